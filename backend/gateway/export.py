"""Token sequences out of a conversation tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparring.backend.gateway.tree import ConversationTree, TurnNode
from sparring.types import TokenSequence, Turn

__all__ = ["Sample", "concat", "concat_samples", "individual_samples"]


@dataclass(frozen=True)
class Sample:
    """A sequence and its reward, None where the session got none. `interaction_id` is that of its last turn."""

    interaction_id: str
    sequence: TokenSequence
    reward: float | None


def concat(tree: ConversationTree) -> tuple[TokenSequence, ...]:
    """One sequence for each leaf of the tree, in the order in which the leaves were recorded.

    Every sampled token is an action exactly once: turns that two leaves share are actions of the first, and context
    (mask 0, no turn mark) of the second. Conversations of frozen models alone give no sequence.
    """
    return tuple(sample.sequence for sample in concat_samples(tree, {}, 1.0))


def concat_samples(tree: ConversationTree, rewards: Mapping[str, float], discount: float) -> list[Sample]:
    """`concat`, each sequence with the reward of its last turn."""
    by_turn = _discounted(tree, rewards, discount)
    done: set[TurnNode] = set()
    samples = []
    for leaf in tree.leaves:
        path = leaf.path
        new = [turn not in done for turn in path]
        done.update(path)
        if any(turn.trained and is_new for turn, is_new in zip(path, new, strict=True)):
            samples.append(Sample(leaf.interaction_id, _sequence(path, new), by_turn.get(leaf.interaction_id)))
    return samples


def individual_samples(tree: ConversationTree, rewards: Mapping[str, float], discount: float) -> list[Sample]:
    """Every turn a sample of its own: its whole context, and what it sampled."""
    by_turn = _discounted(tree, rewards, discount)
    samples = []
    for turn in tree.turns:
        if not turn.trained:
            continue
        path = turn.path
        sequence = _sequence(path, new=[node is turn for node in path])
        samples.append(Sample(turn.interaction_id, sequence, by_turn.get(turn.interaction_id)))
    return samples


def _discounted(tree: ConversationTree, rewards: Mapping[str, float], discount: float) -> dict[str, float]:
    """Each turn's reward: its own, and the next turn's times `discount`. Turns stand in the order of time."""
    following = 0.0
    by_turn = {}
    for turn in reversed(tree.turns if rewards else []):
        following = rewards.get(turn.interaction_id, 0.0) + discount * following
        by_turn[turn.interaction_id] = following
    return by_turn


def _sequence(path: Sequence[TurnNode], new: Sequence[bool]) -> TokenSequence:
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    turns: list[Turn] = []

    def context(ids: Sequence[int]) -> None:
        token_ids.extend(ids)
        mask.extend([False] * len(ids))
        logprobs.extend([0.0] * len(ids))
        versions.extend([-1] * len(ids))

    for node, is_new in zip(path, new, strict=True):
        context(node.prompt_ids)
        start, said = len(token_ids), node.completion
        if is_new and node.trained:
            token_ids.extend(said.token_ids)
            mask.extend([True] * len(said.token_ids))
            logprobs.extend(said.logprobs)
            versions.extend(said.policy_versions)
        else:
            context(said.token_ids)
        if is_new:
            mark = Turn(
                start, len(token_ids), node.agent_id, node.policy_id, node.finish_reason, node.temperature, anchor=None
            )
            turns.append(mark)
    return TokenSequence(
        np.array(token_ids, np.int64),
        np.array(mask, np.bool_),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        tuple(turns),
    )
