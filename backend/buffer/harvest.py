"""What a run's episodes teach after it: those worth imitating, and pairs of which one is better. Read-only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sparring.backend.buffer.records import EpisodeRow
from sparring.backend.buffer.view import BufferView
from sparring.errors import TaskError
from sparring.types import TokenSequence, Trajectory

__all__ = ["Harvest", "Pair", "make_pair", "nothing_left", "preference_pairs", "rewarded_episodes", "training_rows"]


@dataclass(frozen=True)
class Harvest:
    """Sequences to imitate. Their turns are at temperature 1: what is learnt is the distribution of what was said.

    Attributes:
        episodes: that they come from.
        tasks: that those solve.
        repeats: sequences left out since another is the same token for token.
    """

    sequences: tuple[TokenSequence, ...]
    episodes: int
    tasks: int
    repeats: int


@dataclass(frozen=True)
class Pair:
    """Two ways on from one prompt, as sampled: token ids, and for each completion which of its tokens the model said.

    The other tokens of a completion are tool results and templates: context, in which nothing is preferred.
    """

    group_id: str
    task_id: str
    prompt_ids: NDArray[np.int64]
    chosen_ids: NDArray[np.int64]
    chosen_mask: NDArray[np.bool_]
    rejected_ids: NDArray[np.int64]
    rejected_mask: NDArray[np.bool_]
    chosen_reward: float
    rejected_reward: float


def training_rows(view: BufferView) -> list[EpisodeRow]:
    """Training episodes that did not fail, whatever became of them, the oldest first."""
    rows = view.episodes(limit=-1)
    apart = ("evaluation", "probe", "failed")
    return [row for row in reversed(rows) if row.state not in apart and row.reward is not None]


def rewarded_episodes(view: BufferView, *, min_reward: float, per_task: int | None = None) -> Harvest:
    """The sequences of every training episode with at least this reward: rejection sampling.

    Args:
        per_task: at most so many episodes of one task, those of the greatest reward, the newest of equals; so that
            tasks which are often solved do not drown the others.

    Raises:
        TaskError: there is none; with the greatest reward there is, or that the tokens were pruned.
    """
    rows = training_rows(view)
    good = [row for row in rows if row.reward is not None and row.reward >= min_reward]
    whole = [row for row in good if not row.pruned]
    if not whole:
        raise nothing_left(view, f"has a reward of {min_reward:g}", rows, good)
    by_task: dict[tuple[str, str], list[EpisodeRow]] = defaultdict(list)
    for _, row in sorted(enumerate(whole), key=lambda item: (item[1].reward, item[0]), reverse=True):
        by_task[row.env_id, row.task_id].append(row)
    chosen = {row.episode_id for of_task in by_task.values() for row in of_task[:per_task]}
    sequences: dict[bytes, TokenSequence] = {}
    found = 0
    for row in whole:
        if row.episode_id in chosen:
            for sequence in view.trajectory(row.episode_id).sequences:
                if sequence.action_mask.any():
                    found += 1
                    sequences.setdefault(_identity(sequence), _plain(sequence))
    return Harvest(tuple(sequences.values()), len(chosen), len(by_task), found - len(sequences))


def preference_pairs(view: BufferView, *, min_gap: float = 0.0, per_group: int = 4) -> list[Pair]:
    """Pairs of episodes of one group, that is of one task with one seed, whose rewards differ.

    The best of a group is paired with its worst, the second best with the second worst, and so on: each episode is in
    one pair at most.

    Args:
        min_gap: rewards differ by so much at least, and by more than 0.
        per_group: at most so many pairs.

    Raises:
        TaskError: there is no pair; and why.
    """
    rows = training_rows(view)
    groups: dict[str, list[EpisodeRow]] = defaultdict(list)
    for row in rows:
        if not row.pruned:
            groups[row.group_id].append(row)
    pairs: list[Pair] = []
    for members in groups.values():
        made = _pairs_of(view, members, min_gap)
        pairs += [pair for pair, _ in zip(made, range(per_group), strict=False)]
    if not pairs:
        differing = "differ in reward" if min_gap <= 0 else f"differ in reward by {min_gap:g}"
        raise nothing_left(view, f"of one group {differing} from another, from one prompt on", rows, rows)
    return pairs


def _pairs_of(view: BufferView, members: Sequence[EpisodeRow], min_gap: float) -> Iterator[Pair]:
    ranked = sorted(members, key=lambda row: row.reward or 0.0)
    worst, best = 0, len(ranked) - 1
    while worst < best:
        chosen, rejected = ranked[best], ranked[worst]
        gap = (chosen.reward or 0.0) - (rejected.reward or 0.0)
        if gap <= 0 or gap < min_gap:
            return
        pair = make_pair(view.trajectory(chosen.episode_id), view.trajectory(rejected.episode_id))
        if pair is not None:
            yield pair
        worst, best = worst + 1, best - 1


def make_pair(chosen: Trajectory, rejected: Trajectory) -> Pair | None:
    """None where the two are no ways on from one prompt: an episode of several sequences, which has no single
    completion; prompts that differ; or the same tokens."""
    if len(chosen.sequences) != 1 or len(rejected.sequences) != 1:
        return None
    (good,), (bad,) = chosen.sequences, rejected.sequences
    if not good.action_mask.any() or not bad.action_mask.any() or np.array_equal(good.token_ids, bad.token_ids):
        return None
    start = int(good.action_mask.argmax())
    if start != int(bad.action_mask.argmax()) or not np.array_equal(good.token_ids[:start], bad.token_ids[:start]):
        return None
    assert chosen.reward is not None
    assert rejected.reward is not None
    return Pair(
        group_id=chosen.group_id,
        task_id=chosen.task_id,
        prompt_ids=good.token_ids[:start],
        chosen_ids=good.token_ids[start:],
        chosen_mask=good.action_mask[start:],
        rejected_ids=bad.token_ids[start:],
        rejected_mask=bad.action_mask[start:],
        chosen_reward=chosen.reward,
        rejected_reward=rejected.reward,
    )


def _plain(sequence: TokenSequence) -> TokenSequence:
    return replace(sequence, turns=tuple(replace(turn, temperature=1.0) for turn in sequence.turns))


def _identity(sequence: TokenSequence) -> bytes:
    return sequence.token_ids.tobytes() + sequence.action_mask.tobytes()


def nothing_left(view: BufferView, what: str, rows: Sequence[EpisodeRow], wanted: Sequence[EpisodeRow]) -> TaskError:
    """The error of who finds nothing: `what` none of the rows does; of those `wanted`, some may have been pruned."""
    pruned = sum(row.pruned for row in wanted)
    best = max((row.reward for row in rows if row.reward is not None), default=None)
    advice = f"; {pruned} were pruned (rollout.keep_steps)" if pruned else f"; the best reward is {best}"
    return TaskError(f"none of the {len(rows)} training episodes in {view.path} {what}{advice}")
