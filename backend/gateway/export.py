"""Token sequences out of a conversation tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparring.backend.gateway.tree import ConversationTree, TurnNode
from sparring.types import TokenSequence, Turn

__all__ = ["concat"]


def concat(tree: ConversationTree) -> tuple[TokenSequence, ...]:
    """One sequence for each leaf of the tree, in the order in which the leaves were recorded.

    Every sampled token is an action exactly once: turns that two leaves share are actions of the first, and context
    (mask 0, no turn mark) of the second.
    """
    done: set[TurnNode] = set()
    sequences = []
    for leaf in tree.leaves:
        path = leaf.path
        sequences.append(_sequence(path, new=[turn not in done for turn in path]))
        done.update(path)
    return tuple(sequences)


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
