"""Token sequences folded into one row, so that a token shared by several of them is computed once.

The sequences are sorted by their tokens. Then what a sequence shares with all earlier ones is exactly what it shares
with its neighbour, so one pass over the sorted list gives the prefix tree: each sequence adds one chunk, its tokens
after the longest common prefix with the one before, and that chunk attends to the sequence's own path alone.

What no loss term needs is left out: a sequence ends before its last action token, whose successor nobody predicts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.backend.trainer.attention import TreeLayout
from sparring.errors import TrainerError

__all__ = ["PackedRow", "Sample", "common_prefix", "pack", "split_rows"]


@dataclass(frozen=True, eq=False)
class Sample:
    """One token sequence with all that its loss needs. Arrays have length T and are read where `action_mask` is True.

    Attributes:
        lags: updates between the weights that sampled the token and the trainer's.
        temperatures: what divided the logits when the token was sampled.
        index: of the sequence within the step, so that results find their way back.
        name: of the episode, for errors.
    """

    token_ids: NDArray[np.int64]
    action_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float64]
    lags: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    index: int = 0
    name: str = ""

    @property
    def context(self) -> NDArray[np.int64]:
        """The tokens to forward: up to the one that predicts the last action token."""
        return self.token_ids[: int(np.flatnonzero(self.action_mask)[-1])]


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One forward. N forwarded tokens, U scored positions, M loss terms (action tokens), S sequences.

    Attributes:
        input_ids, position_ids: (N,)
        layout: which keys each token attends to.
        scored: (U,) packed positions whose next-token distribution is needed; a position shared by several sequences
            (under one temperature) is scored once.
        inverse_temperature: (U,)
        term_row: (M,) index into `scored`. targets: (M,) token ids.
        behaviour_logprobs, advantages, lags: (M,)
        sequence: (M,) local index 0..S-1 of the term's sequence; `sample_index` (S,) is its index within the step.
        position: (M,) index of the action token within its sequence.
        unpacked_tokens: what the sequences would cost one by one.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: TreeLayout
    scored: Tensor
    inverse_temperature: Tensor
    term_row: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    lags: Tensor
    sequence: Tensor
    sample_index: Tensor
    position: Tensor
    unpacked_tokens: int

    def to(self, device: torch.device | str) -> PackedRow:
        tensors: dict[str, Any] = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, layout=self.layout.to(device), **tensors)

    @property
    def tokens(self) -> int:
        return self.input_ids.numel()


def common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the longest common prefix of two flat arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def split_rows(samples: Sequence[Sample], token_budget: int, at_least: int = 1) -> list[list[Sample]]:
    """Sort samples by their tokens and cut them into rows of at most `token_budget` forwarded tokens and loss terms:
    as few as that allows, and as even as so few can be. A small row at the end would keep a GPU from its work.

    Args:
        at_least: rows wanted, one for each rank; fewer come back where there are fewer samples.

    Raises:
        TrainerError: a single sequence exceeds the budget, or its first token is an action (nothing predicts it).
    """
    if not samples:
        return []
    for sample in samples:
        _check(sample, token_budget)
    ordered = sorted(samples, key=lambda s: s.context.astype(">i8").tobytes())
    whole = [len(sample.context) for sample in ordered]
    novel = [whole[0], *(len(b.context) - common_prefix(a.context, b.context) for a, b in pairwise(ordered))]
    terms = [int(sample.action_mask.sum()) for sample in ordered]

    def starts(limit: int) -> list[int]:
        """Where the rows begin if each is filled up to `limit`; a sample beyond it has a row of its own."""
        found: list[int] = []
        tokens = scored = 0
        for i, (cost, scores) in enumerate(zip(novel, terms, strict=True)):
            if not found or max(tokens + cost, scored + scores) > limit:
                found.append(i)
                tokens, scored, cost = 0, 0, whole[i]
            tokens, scored = tokens + cost, scored + scores
        return found

    wanted = min(at_least, len(ordered))
    most = max(len(starts(token_budget)), wanted)
    limit = 1 + bisect_left(range(1, token_budget), True, key=lambda limit: len(starts(limit)) <= most)
    ends = [*starts(limit), len(ordered)]
    while len(ends) <= wanted:  # a limit lower by one may give far more rows than are wanted
        a, b = max(pairwise(ends), key=lambda row: row[1] - row[0])
        ends = sorted([*ends, (a + b) // 2])
    return [ordered[a:b] for a, b in pairwise(ends)]


def pack(samples: Sequence[Sample], *, share: bool = True, sliding_window: int | None = None) -> PackedRow:
    """Fold samples into one row.

    Args:
        share: False lays the sequences end to end, nothing shared: what the tests compare with.
        sliding_window: for models whose layers have one.
    """
    ordered = sorted(samples, key=lambda s: s.context.astype(">i8").tobytes())
    tokens: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    paths: list[NDArray[np.int64]] = []
    chunks: list[int] = []  # tokens that each sequence adds
    terms: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # action positions, packed position of the predictor
    total = 0
    for i, sample in enumerate(ordered):
        context = sample.context
        shared = common_prefix(ordered[i - 1].context, context) if i and share else 0
        novel = len(context) - shared
        prefix = paths[-1][:shared] if shared else np.empty(0, np.int64)
        path = np.concatenate([prefix, np.arange(total, total + novel)])
        tokens.append(context[shared:])
        positions.append(np.arange(shared, len(context)))
        paths.append(path)
        chunks.append(novel)
        total += novel
        actions = np.flatnonzero(sample.action_mask)
        terms.append((actions, path[actions - 1]))

    def gather(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(s, name)[a] for s, (a, _) in zip(ordered, terms, strict=True)])

    predictors = np.concatenate([p for _, p in terms])
    temperatures, which = np.unique(gather("temperatures"), return_inverse=True)
    scored, term_row = np.unique(predictors * len(temperatures) + which, return_inverse=True)
    return PackedRow(
        input_ids=torch.from_numpy(np.concatenate(tokens)),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        layout=TreeLayout(paths, chunks, sliding_window),
        scored=torch.from_numpy(scored // len(temperatures)),
        inverse_temperature=torch.from_numpy(1.0 / temperatures[scored % len(temperatures)].astype(np.float64)),
        term_row=torch.from_numpy(term_row),
        targets=torch.from_numpy(gather("token_ids")),
        behaviour_logprobs=torch.from_numpy(gather("behaviour_logprobs").astype(np.float32)),
        advantages=torch.from_numpy(gather("advantages").astype(np.float32)),
        lags=torch.from_numpy(gather("lags").astype(np.int32)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(ordered)), [len(a) for a, _ in terms])),
        sample_index=torch.tensor([s.index for s in ordered]),
        position=torch.from_numpy(np.concatenate([a for a, _ in terms])),
        unpacked_tokens=sum(len(s.context) for s in ordered),
    )


def _check(sample: Sample, token_budget: int) -> None:
    what = f"episode {sample.name or sample.index}"
    if not sample.action_mask.any():
        raise TrainerError(f"{what}: a sequence without action tokens cannot be trained; leave it out")
    if sample.action_mask[0]:
        raise TrainerError(f"{what}: its first token is an action, but no token predicts it: a prompt must come first")
    if (length := len(sample.context)) > token_budget:
        raise TrainerError(
            f"{what} has {length} tokens, more than trainer.token_budget={token_budget}: "
            "raise the budget, or lower model.max_length or rollout.max_episode_tokens"
        )
