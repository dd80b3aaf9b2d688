"""Keys and values of many sequences, one slot each, and attention over them for one flat batch of ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Feed", "SlotCache"]

_VIEW_STEP = 32  # lengths are read in whole steps, so that matrix shapes repeat and their kernels stay cached


@dataclass(frozen=True)
class Feed:
    """Tokens that enter one slot in a forward pass: positions [start, start + len(token_ids))."""

    slot: int
    start: int
    token_ids: Sequence[int]


class SlotCache:
    """Keys `[layer, slot, head, D, T]`, values `[layer, slot, head, T, D]`.

    Keys lie transposed: a decoding row multiplies (queries of a head x D) by (D x T), and with T innermost that
    product runs twice as fast on a CPU as with D innermost. Memory starts as zeros that the system hands out page by
    page as they are written, so long slots that stay short cost little; and stale entries are finite, so a mask of
    -inf is enough to leave them out.
    """

    def __init__(self, *, layers: int, slots: int, heads: int, key_dim: int, value_dim: int, length: int,
                 dtype: torch.dtype, device: torch.device, row_by_row: bool = False) -> None:  # fmt: skip
        """`row_by_row`: attend to each decoding row alone, so that its numbers do not depend on its neighbours."""
        self.length = -(-length // _VIEW_STEP) * _VIEW_STEP
        self.keys = torch.zeros(layers, slots, heads, key_dim, self.length, dtype=dtype, device=device)
        self.values = torch.zeros(layers, slots, heads, self.length, value_dim, dtype=dtype, device=device)
        self._layers = list(zip(self.keys, self.values, strict=True))
        self._row_by_row = row_by_row

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, :, :, :length].copy_(self.keys[:, source, :, :, :length])
        self.values[:, target, :, :length].copy_(self.values[:, source, :, :length])

    def clear(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def plan(self, feeds: Sequence[Feed]) -> None:
        """Prepare for one forward pass over the feeds' tokens, flat and in order; those of one token come first."""
        device = self.keys.device
        decode = [feed for feed in feeds if len(feed.token_ids) == 1]
        self._extend = feeds[len(decode) :]
        self._count = len(decode)
        if not decode:
            return
        slots = torch.tensor([feed.slot for feed in decode], device=device)
        starts = torch.tensor([feed.start for feed in decode], device=device)
        self._slots, self._starts = slots, starts
        longest = max(feed.start for feed in decode) + 1
        self._view = min(self.length, -(-longest // _VIEW_STEP) * _VIEW_STEP)
        self._lengths = [feed.start + 1 for feed in decode]
        lowest, highest = min(feed.slot for feed in decode), max(feed.slot for feed in decode)
        span = highest + 1 - lowest
        # A run of slots is read in place. Idle slots inside it are cheaper to compute than all rows are to copy.
        self._run = (lowest, highest + 1) if span <= 1.5 * len(decode) else None
        in_order = span == len(decode) and all(f.slot == lowest + i for i, f in enumerate(decode))
        self._place = None if in_order else slots - lowest
        reach = starts
        if self._run is not None and self._place is not None:
            reach = torch.zeros(span, dtype=torch.long, device=device).index_copy_(0, self._place, starts)
        unseen = torch.arange(self._view, device=device) > reach[:, None]
        self._mask = torch.zeros(unseen.shape, dtype=self.keys.dtype, device=device).masked_fill_(unseen, -torch.inf)
        self._mask = self._mask[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the new keys and values, and attend to all that each row has.

        Args:
            query: `[1, query heads, N, D]`; key and value: `[1, heads, N, D]`.

        Returns:
            `[1, N, query heads, D of the values]`.
        """
        keys, values = self._layers[layer]
        tokens = query.shape[2]
        out = query.new_empty(tokens, query.shape[1], values.shape[-1])
        n = self._count
        if n:
            keys[self._slots, :, :, self._starts] = key[0, :, :n].transpose(0, 1)
            values[self._slots, :, self._starts] = value[0, :, :n].transpose(0, 1)
            packed = query[0, :, :n].transpose(0, 1).reshape(n, keys.shape[1], -1, query.shape[-1]) * scaling
            out[:n] = (self._one_by_one if self._row_by_row else self._together)(packed, keys, values).view_as(out[:n])
        for feed in self._extend:
            end = n + len(feed.token_ids)
            out[n:end] = self._one_prompt(feed, query[:, :, n:end], key[0, :, n:end], value[0, :, n:end],
                                          keys[feed.slot], values[feed.slot], scaling)  # fmt: skip
            n = end
        return out[None]

    def _together(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Decoding rows, `[rows, heads, queries a head, D]`, scaled."""
        if self._run is None:
            keys, values = keys[self._slots, ..., : self._view], values[self._slots, :, : self._view]
            return torch.softmax(query @ keys + self._mask, -1) @ values
        run = slice(*self._run)
        keys, values = keys[run, ..., : self._view], values[run, :, : self._view]
        if self._place is None:
            return torch.softmax(query @ keys + self._mask, -1) @ values
        spread = query.new_zeros(keys.shape[0], *query.shape[1:]).index_copy_(0, self._place, query)
        return (torch.softmax(spread @ keys + self._mask, -1) @ values)[self._place]

    def _one_by_one(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = []
        for row, (slot, length) in enumerate(zip(self._slots.tolist(), self._lengths, strict=True)):
            p = torch.softmax(query[row] @ keys[slot, ..., :length], -1)
            rows.append(p @ values[slot, :, :length])
        return torch.stack(rows)

    def _one_prompt(self, feed: Feed, query: Tensor, key: Tensor, value: Tensor,
                    keys: Tensor, values: Tensor, scaling: float) -> Tensor:  # fmt: skip
        """Several tokens of one slot; `keys` and `values` are the slot's own."""
        start, end = feed.start, feed.start + len(feed.token_ids)
        keys[..., start:end] = key.transpose(-1, -2)
        values[:, start:end] = value
        mask = None
        if start:
            positions = torch.arange(end, device=query.device)
            mask = positions <= positions[start:, None]
            key, value = keys[..., :end].transpose(-1, -2).contiguous(), values[:, :end]
        out = F.scaled_dot_product_attention(
            query, key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out[0].transpose(0, 1)
