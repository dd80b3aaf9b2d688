"""What a run says at its end: the table before and after, one task's conversation before and after, and the files."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparring.backend.buffer import BufferView
from sparring.curve import plot_curve
from sparring.evaluation import EvalEpisode, EvalSummary, read_episodes, summarise
from sparring.fates import fates
from sparring.run_dir import RunDirectory
from sparring.transcript import said

__all__ = ["print_report", "write_report"]

_FAILURES_READ = 200
_MESSAGE_WIDTH = 300
_GLOSSARY = (
    "in metrics.jsonl: drift, by how much a token's log-probability differs between sampler and trainer, in nats; "
    "kl/k3, the divergence of the two, estimated"
)


def write_report(directory: RunDirectory, title: str, *, staleness: int, keep_best: int, wall_s: float) -> None:
    """Write the curve and, last, the summary, from the run's own files.

    Args:
        keep_best: so many checkpoints were kept for their evaluations.
        wall_s: seconds since this process began the run or went on with it.
    """
    records = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"]
    evaluated = [r["step"] for r in records if r["kind"] == "evaluation"]
    episodes = {step: read_episodes(directory.evaluation(step)) for step in evaluated}
    summaries = [summarise(step, episodes[step]) for step in evaluated]
    first, last = summaries[0], summaries[-1]
    rewards = [r.get("reward", math.nan) for r in steps]  # none where a resumed step found all its groups in the buffer
    plot_curve(directory.curve, title, [r["step"] for r in steps], rewards, summaries)
    summary = {
        "steps": last.step,
        "before": dataclasses.asdict(first),
        "after": dataclasses.asdict(last),
        "apart": last.low > first.high,
        "train_s": sum(r["time/step_s"] for r in steps),
        "wall_s": wall_s,
        "staleness": staleness,
        "dropped_groups": int(sum(r.get("groups/dropped", 0) for r in steps)),
        "max_lag": int(max(r["lag/max"] for r in steps)),
        "best": _best(directory, summaries, keep_best),
        "conversation": _conversation(episodes[first.step], episodes[last.step]),
    }
    directory.summary.write_text(json.dumps(summary, indent=1))


def print_report(console: Console, directory: RunDirectory) -> None:
    """Print the summary of a finished run."""
    summary = json.loads(directory.summary.read_text())
    with BufferView(directory.buffer) as buffer:  # now: what was in flight at the last step has ended since
        counts, groups = buffer.counts(), Counter(buffer.group_states().values())
    for when, lines in summary["conversation"].items():
        console.print(f"\nOne held-out task, {when} training:", style="bold", highlight=False)
        for line in lines:
            console.print(Text(f"  {line}"))
    table = Table("held-out tasks", "solved", "95% interval", "mean reward", "tasks", "failed", box=None)
    for when in ("before", "after"):
        evaluation = EvalSummary(**summary[when])
        table.add_row(
            f"{when} (step {evaluation.step})",
            f"{evaluation.success:.1%}",
            f"{evaluation.low:.1%} to {evaluation.high:.1%}",
            f"{evaluation.reward:.3f}",
            str(evaluation.episodes),
            str(evaluation.failed),
        )
    console.print()
    console.print(table)
    console.print(
        f"\ntraining took {summary['train_s']:.0f} s for {summary['steps']} steps, start-up, evaluations that "
        f"it waited for and the last checkpoint aside "
        f"(all in all {summary['wall_s']:.0f} s since this process began the run or went on with it)\n"
        f"the version lag was at most {summary['max_lag']} (bound η = {summary['staleness']})\n"
        f"episodes: {fates(counts)}\n"
        f"groups: {fates(groups)}{_dropped_besides(groups, summary)}\n"
        f"{_best_line(summary.get('best', ()))}"
        f"files: {directory.model}/ (Hugging Face folder), {directory.metrics}, {directory.curve}\n"
        f"every episode: sparring view {directory.root}\n"
        f"{_GLOSSARY}",
        highlight=False,
        soft_wrap=True,
    )
    if counts.get("failed"):
        console.print(Text(_failures(directory)), soft_wrap=True)


def _best(directory: RunDirectory, summaries: Sequence[EvalSummary], keep_best: int) -> list[dict[str, Any]]:
    """The checkpoints that stand for their evaluations, as the trainer ranks them: the earlier at equal reward."""
    ranked = sorted((s for s in summaries if s.step > 0), key=lambda s: (-s.reward, s.step))[:keep_best]
    return [
        {"checkpoint": str(directory.checkpoint(s.step)), "reward": s.reward, "success": s.success}
        for s in ranked
        if directory.checkpoint(s.step).is_dir()
    ]


def _best_line(best: Sequence[Mapping[str, Any]]) -> str:
    named = [f"{b['checkpoint']} (held-out reward {b['reward']:.3f}, {b['success']:.1%} solved)" for b in best]
    return f"best of the evaluated checkpoints: {', '.join(named)}\n" if named else ""


def _dropped_besides(groups: Mapping[str, int], summary: Mapping[str, Any]) -> str:
    """Where the column of the live table does not add up to all groups that were dropped, what it leaves out."""
    besides = groups.get("dropped", 0) - summary.get("dropped_groups", 0)
    return f" ({besides} of these after the last batch, or in steps that a resume repeated)" if besides > 0 else ""


def _failures(directory: RunDirectory) -> str:
    """The commonest message of the newest failures, and where to read all."""
    with BufferView(directory.buffer) as buffer:
        rows = buffer.episodes(state="failed", limit=_FAILURES_READ)
        failures = [(row, failure) for row in rows if (failure := buffer.failure(row)) is not None]
    # One fault's messages differ in the episode and the task that they name.
    kinds = [f.message.replace(row.episode_id, "").replace(row.task_id, "") for row, f in failures]
    lines = [f"every failed attempt: sparring view {directory.root} --state failed"]
    if kinds:
        commonest, count = Counter(kinds).most_common(1)[0]
        failure = failures[kinds.index(commonest)][1]
        message = textwrap.shorten(failure.message, _MESSAGE_WIDTH)
        lines.insert(0, f"{count} of the last {len(kinds)} failed by {failure.kind}, such as: {message}")
    return "\n".join(lines)


def _conversation(before: Sequence[EvalEpisode], after: Sequence[EvalEpisode]) -> Mapping[str, list[str]]:
    """The same task before and after: one that was missed and is now solved, if there is one."""
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b.reward is not None and a.reward is not None]
    pairs.sort(key=lambda pair: (pair[0].solved, not pair[1].solved))
    return {"before": _exchange(pairs[0][0]), "after": _exchange(pairs[0][1])} if pairs else {}


def _exchange(episode: EvalEpisode) -> list[str]:
    """The task and what the model said to it; worked examples in the prompt are left out."""
    spoken = [i for i, message in enumerate(episode.messages) if message["role"] == "assistant"]
    start = spoken[-episode.turns] - 1 if 0 < episode.turns <= len(spoken) else 0
    return [*(f"{m['role']}: {said(m)}" for m in episode.messages[max(start, 0) :]), f"reward {episode.reward:g}"]
