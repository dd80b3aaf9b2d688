"""What a run says of its sampling: while the trainer waits for a batch, and of a batch whose episodes failed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparring.config import RolloutConfig
from sparring.transcript import printable

if TYPE_CHECKING:
    from sparring.backend.rollout.stats import RolloutStats, SinceBatch

__all__ = ["failure_line", "sampling_line"]

_MESSAGE_WIDTH = 300
_HINT_AFTER = 3  # groups in a row without signal


def sampling_line(stats: RolloutStats, knobs: RolloutConfig) -> str:
    """One line; a second one with the commonest failure, and one with a hint where every group so far was dropped for
    equal rewards.
    """
    since = stats.since_batch
    failed = f", {since.failures} of them failed" if since.failures else ""
    line = (
        f"sampling for the next step: {since.episodes} episodes ended{failed}, {stats.running_episodes} running; "
        f"{stats.ready_groups} of {knobs.groups_per_step} groups ready{_dropped(since)}"
    )
    if failed := failure_line(since):
        line += f"\n{failed}"
    equal = sum(since.equal_rewards.values())
    if equal < max(_HINT_AFTER, since.dropped_groups) or stats.ready_groups:
        return line
    return (
        f"{line}\nevery one of {equal} groups had equal rewards: {_rewards(since.equal_rewards)}. Such a group teaches "
        "nothing: are the tasks too hard or too easy for the model, is the reward right, does the prompt show the "
        f"format? After more than rollout.max_refill={knobs.max_refill} of them no more are started: once those in "
        "play have ended alike, the run stops and shows the last ones"
    )


def failure_line(since: SinceBatch) -> str:
    """How many episodes failed and of what, or nothing where none did."""
    if since.reason is None:
        return ""
    message = textwrap.shorten(printable(since.reason.message), _MESSAGE_WIDTH)
    return (
        f"{since.failures} of {since.episodes} episodes failed, {since.alike} alike by {since.reason.kind}, such as: "
        f"{message}"
    )


def _dropped(since: SinceBatch) -> str:
    equal = sum(since.equal_rewards.values())
    reasons = {
        "for equal rewards": equal,
        "for failures": since.too_few,
        "without a sampled token": since.dropped_groups - equal - since.too_few,
    }
    told = [f"{count} {reason}" for reason, count in reasons.items() if count]
    return f"; dropped {', '.join(told)}" if told else ""


def _rewards(counts: Mapping[float, int]) -> str:
    """`0`, or `0 in 5, 1 in 2`, the commonest first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    if len(ranked) == 1:
        return f"{ranked[0][0]:g}"
    more = ", ..." if len(ranked) > 3 else ""
    return ", ".join(f"{reward:g} in {count}" for reward, count in ranked[:3]) + more
