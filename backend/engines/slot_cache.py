"""Keys and values of many sequences, one slot each, and attention over them for one flat batch of ragged rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Feed", "SlotCache", "batch_order"]

_FIRST_LENGTH = 256
_SHORT = 64  # tokens of an extension up to which several are padded to one matrix product
_VIEW_STEP = 32  # lengths are read in whole steps, so that matrix shapes repeat and their kernels stay cached


@dataclass(frozen=True)
class Feed:
    """Tokens that enter one slot in a forward pass: positions [start, start + len(token_ids))."""

    slot: int
    start: int
    token_ids: Sequence[int]


def batch_order(feed: Feed) -> tuple[int, int]:
    """Sort key of a flat batch: single tokens, then short extensions, then prompts; each by slot."""
    return _kind(feed), feed.slot


class SlotCache:
    """Keys `[layer, slot, head, D, T]`, values `[layer, slot, head, T, D]`.

    Keys lie transposed: a decoding row multiplies (queries of a head x D) by (D x T), and with T innermost that
    product runs twice as fast on a CPU as with D innermost. T starts small and grows by a quarter when a
    sequence needs it, up to `length`. Memory starts as zeros, and stale entries are finite, so a mask of -inf is enough
    to leave them out.
    """

    def __init__(self, *, layers: int, slots: int, heads: int, key_dim: int, value_dim: int, length: int,
                 dtype: torch.dtype, device: torch.device, row_by_row: bool = False) -> None:  # fmt: skip
        """`row_by_row`: attend to each decoding row alone, so that its numbers do not depend on its neighbours."""
        self._longest = _round_up(length)
        self._shape = (layers, slots, heads, key_dim, value_dim)
        self._dtype, self._device, self._row_by_row = dtype, device, row_by_row
        self.clear()

    def clear(self) -> None:
        """Start anew with zeros."""
        self._allocate(min(_FIRST_LENGTH, self._longest))

    def reserve(self, length: int) -> None:
        """Make room for sequences of so many tokens."""
        if length <= self._length:
            return
        old_length, old_keys, old_values = self._length, self.keys, self.values
        grown = _round_up(max(length, self._length + self._length // 4))
        self._allocate(min(grown, self._longest))
        self.keys[..., :old_length] = old_keys
        self.values[..., :old_length, :] = old_values

    def _allocate(self, length: int) -> None:
        layers, slots, heads, key_dim, value_dim = self._shape
        self._length = length
        self.keys = _zeros((layers, slots, heads, key_dim, length), self._dtype, self._device)
        self.values = _zeros((layers, slots, heads, length, value_dim), self._dtype, self._device)
        self._layers = list(zip(self.keys, self.values, strict=True))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, :, :, :length].copy_(self.keys[:, source, :, :, :length])
        self.values[:, target, :, :length].copy_(self.values[:, source, :, :length])

    def plan(self, feeds: Sequence[Feed]) -> None:
        """Prepare for one forward pass over the tokens of feeds in `batch_order`, flat."""
        self.reserve(max(feed.start + len(feed.token_ids) for feed in feeds))
        self._parts: list[_Block | _Prompt] = []
        first = 0
        for kind, group in itertools.groupby(feeds, key=_kind):
            same = list(group)
            for part in [same] if kind < 2 else [[feed] for feed in same]:
                end = first + sum(len(feed.token_ids) for feed in part)
                if kind == 2:
                    self._parts.append(_Prompt(slice(first, end), part[0]))
                else:
                    self._parts.append(_Block.of(slice(first, end), part, self._length, self._dtype, self._device))
                first = end

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the new keys and values, and attend to all that each row has.

        Args:
            query: `[1, query heads, N, D]`; key and value: `[1, heads, N, D]`.

        Returns:
            `[1, N, query heads, D of the values]`.
        """
        keys, values = self._layers[layer]
        out = query.new_empty(query.shape[2], query.shape[1], values.shape[-1])
        for part in self._parts:
            tokens = part.tokens
            q, k, v = query[0, :, tokens], key[0, :, tokens], value[0, :, tokens]
            if isinstance(part, _Prompt):
                out[tokens] = _attend_prompt(part.feed, q, k, v, keys[part.feed.slot], values[part.feed.slot], scaling)
            elif self._row_by_row and part.width == 1:
                part.store(k, v, keys, values)
                out[tokens] = _attend_rows(part, q * scaling, keys, values)
            else:
                part.store(k, v, keys, values)
                out[tokens] = _attend_block(part, q * scaling, keys, values)
        return out[None]


@dataclass(frozen=True)
class _Prompt:
    """The tokens of one slot, many or the first ones there; `tokens` are those of the flat batch."""

    tokens: slice
    feed: Feed


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows that attend in one product, each padded to `width` queries.

    Attributes:
        slots, positions: of each token.
        padded: for each place (row, query) the token in it, repeated where the row is shorter; None at width 1.
        filled: the places that hold a token of their own; None at width 1.
        rows: the slot of each row.
        run: a range of slots that is read in place; None where rows lie so far apart that copying them costs less
            than computing the slots between them.
        place: for each row its index in the run; None where they are the same.
        view: how many positions are read.
        mask: `[rows or slots of the run, 1, 1, width, view]`, added to the scores.
    """

    tokens: slice
    slots: Tensor
    positions: Tensor
    width: int
    padded: Tensor | None
    filled: Tensor | None
    rows: list[int]
    run: slice | None
    place: Tensor | None
    view: int
    mask: Tensor

    @classmethod
    def of(cls, tokens: slice, feeds: list[Feed], length: int, dtype: torch.dtype, device: torch.device) -> _Block:
        counts = [len(feed.token_ids) for feed in feeds]
        width = max(counts)
        rows = [feed.slot for feed in feeds]
        lowest, span = min(rows), max(rows) + 1 - min(rows)
        run = slice(lowest, lowest + span) if span <= 1.5 * len(rows) else None
        in_order = run is not None and rows == list(range(lowest, lowest + span))
        place = torch.tensor([row - lowest for row in rows], device=device) if run and not in_order else None
        view = min(length, _round_up(max(feed.start + count for feed, count in zip(feeds, counts, strict=True))))
        reach = torch.tensor(
            [[feed.start + min(i, count - 1) for i in range(width)] for feed, count in zip(feeds, counts, strict=True)],
            device=device,
        )
        if place is not None:  # idle slots of the run look at their first position; nobody looks at the result
            reach = torch.zeros(span, width, dtype=torch.long, device=device).index_copy_(0, place, reach)
        unseen = torch.arange(view, device=device) > reach[..., None]
        mask = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, -torch.inf)
        padded = filled = None
        if width > 1:
            firsts = list(itertools.accumulate(counts, initial=0))
            padded = torch.tensor(
                [first + min(i, count - 1) for first, count in zip(firsts, counts, strict=False) for i in range(width)],
                device=device,
            )
            filled = torch.tensor(
                [row * width + i for row, count in enumerate(counts) for i in range(count)], device=device
            )
        return cls(
            tokens=tokens,
            slots=torch.tensor([feed.slot for feed in feeds for _ in feed.token_ids], device=device),
            positions=torch.tensor(
                [feed.start + i for feed in feeds for i in range(len(feed.token_ids))], device=device
            ),
            width=width, padded=padded, filled=filled, rows=rows, run=run, place=place, view=view,
            mask=mask[:, None, None],
        )  # fmt: skip

    def store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """`key`, `value`: `[heads, tokens, D]`."""
        keys[self.slots, :, :, self.positions] = key.transpose(0, 1)
        values[self.slots, :, self.positions] = value.transpose(0, 1)


def _attend_block(block: _Block, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`query`: `[query heads, tokens, D]`, scaled. Returns `[tokens, query heads, D of the values]`."""
    heads, width = keys.shape[1], block.width
    packed = query.transpose(0, 1)
    if block.padded is not None:
        packed = packed[block.padded]
    packed = packed.reshape(len(block.rows), width, heads, -1, query.shape[-1])
    packed = packed.permute(0, 2, 3, 1, 4).flatten(2, 3)  # rows, heads, queries a head x width, D
    if block.place is not None:
        packed = packed.new_zeros(block.mask.shape[0], *packed.shape[1:]).index_copy_(0, block.place, packed)
    at = block.slots.new_tensor(block.rows) if block.run is None else block.run
    scores = (packed @ keys[..., : block.view][at]).unflatten(2, (-1, width))
    scores += block.mask
    out = torch.softmax(scores, -1).flatten(2, 3) @ values[:, :, : block.view][at]
    if block.place is not None:
        out = out[block.place]
    out = out.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).reshape(-1, query.shape[0], values.shape[-1])
    return out if block.filled is None else out[block.filled]


def _attend_rows(block: _Block, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same for rows of one token, each alone."""
    rows = []
    for row, (slot, position) in enumerate(zip(block.rows, block.positions.tolist(), strict=True)):
        packed = query[:, row].unflatten(0, (keys.shape[1], -1))
        p = torch.softmax(packed @ keys[slot, ..., : position + 1], -1)
        rows.append((p @ values[slot, :, : position + 1]).flatten(0, 1))
    return torch.stack(rows)


def _attend_prompt(feed: Feed, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor,
                   scaling: float) -> Tensor:  # fmt: skip
    """Store and attend for many tokens of one slot, whose own `keys` and `values` these are."""
    start, end = feed.start, feed.start + len(feed.token_ids)
    keys[..., start:end] = key.transpose(-1, -2)
    values[:, start:end] = value
    mask = None
    if start:
        positions = torch.arange(end, device=query.device)
        mask = positions <= positions[start:, None]
        key, value = keys[..., :end].transpose(-1, -2).contiguous(), values[:, :end]
    out = F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _kind(feed: Feed) -> int:
    if len(feed.token_ids) == 1:
        return 0
    return 1 if feed.start and len(feed.token_ids) <= _SHORT else 2


def _round_up(length: int) -> int:
    return -(-length // _VIEW_STEP) * _VIEW_STEP


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on a CPU, take memory only as they are written: the system hands out zero pages. torch's do not."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
