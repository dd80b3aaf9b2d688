"""`sparring export`: a run's rewarded episodes as JSONL, for supervised training here or anywhere else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sparring.agents.runner import make_env
from sparring.backend.buffer import BufferView
from sparring.backend.buffer.harvest import nothing_left, training_rows
from sparring.config_file import load_config
from sparring.errors import SparringError
from sparring.outputs import check_new_file, writing
from sparring.run_dir import RunDirectory
from sparring.types import TokenSequence, Trajectory

__all__ = ["Exported", "export"]


class Exported(NamedTuple):
    """How much was written: lines, and episodes by what became of them in the run."""

    lines: int
    episodes: Mapping[str, int]


def export(
    run: str, form: Literal["chat", "tokens"], min_reward: float, out: Path, *, overwrite: bool = False
) -> Exported:
    """Write the training episodes that did not fail and have this reward at least, the oldest first; those that were
    pruned have nothing left to write.

    "chat": one line an episode, `messages` and `tools` in OpenAI's format. "tokens": one line a sequence, exactly as it
    was sampled; for models with the same tokenizer. Held-out episodes are never among them.

    Raises:
        ConfigError: `run` is no run folder, or `out` cannot be written, or is there already.
        TaskError: no episode has that reward, with the greatest that one has; or all that do were pruned.
    """
    directory = RunDirectory.of(run)
    check_new_file(out, overwrite=overwrite)
    tools = _tools(directory)
    count = 0
    with BufferView(directory.buffer) as buffer:
        rows = training_rows(buffer)
        good = [row for row in rows if row.reward is not None and row.reward >= min_reward]
        chosen = [row for row in good if not row.pruned]
        if not chosen:
            raise nothing_left(buffer, f"has a reward of {min_reward:g}", rows, good)
        with writing(out), out.open("w", encoding="utf-8") as file:
            for row in chosen:
                trajectory = buffer.trajectory(row.episode_id)
                for line in _lines(trajectory, form, tools.get(trajectory.env_id, [])):
                    file.write(json.dumps(line) + "\n")
                    count += 1
    return Exported(count, Counter(row.state for row in chosen))


def _lines(trajectory: Trajectory, form: str, tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    about = {
        "episode_id": trajectory.episode_id,
        "env_id": trajectory.env_id,
        "task_id": trajectory.task_id,
        "reward": trajectory.reward,
    }
    if form == "chat":
        yield {**about, "messages": list(trajectory.messages), "tools": tools}
        return
    for sequence in trajectory.sequences:
        yield {**about, **_arrays(sequence)}


def _arrays(sequence: TokenSequence) -> dict[str, Any]:
    return {
        "token_ids": sequence.token_ids.tolist(),
        "action_mask": sequence.action_mask.tolist(),
        "behaviour_logprobs": sequence.behaviour_logprobs.tolist(),
        "policy_versions": sequence.policy_versions.tolist(),
        "turns": [vars(turn) for turn in sequence.turns],
    }


def _tools(directory: RunDirectory) -> Mapping[str, list[dict[str, Any]]]:
    """The tools that each environment has from its construction on, by the name under which episodes are stored."""
    env_config = load_config(directory.config).config.env
    tools = {}
    for part in env_config.parts:
        try:
            env = make_env(part.id, part.kwargs)
        except SparringError:  # the run may be of another machine: its conversations are there all the same
            continue
        tools[part.label if env_config.mixture else part.id] = env.tools
        env.close()
    return tools
