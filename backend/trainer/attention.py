"""Exact attention over a prefix tree by PyTorch's own SDPA: no kernel from a hub, any device.

A row holds one chunk of queries a sequence; its keys are the sequence's whole path through the tree. Chunks of like
size are padded into one batched call; a chunk without a prefix (q = k) is plain causal attention and needs no mask.
Nor does a long chunk behind a prefix: it has a call of its own, in which its queries are the last of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from sparring.backend.trainer.block_attention import block_attention, prefers_block_attention
from sparring.backend.trainer.tail_attention import prefers_tail_attention, tail_attention
from sparring.backend.trainer.varlen_attention import Paths, build_paths, prefers_varlen, varlen_attention

__all__ = ["TREE_ATTENTION", "Block", "TreeLayout", "attend_by_blocks", "register_tree_attention", "tree_attention"]

TREE_ATTENTION = "sparring_tree"

# One more SDPA call and its gathers cost about as much as so many query-key products (measured on a CPU, SmolLM2).
_CALL_COST = 20_000

# From so many query-key products on, a chunk behind a prefix is long.
_LONG = 1 << 16


@dataclass(frozen=True, eq=False)
class Block:
    """One SDPA call of b chunks, padded to q queries and k keys.

    Attributes:
        queries: (b, q) packed positions. keys: (b, k) packed positions. Padding points at position 0.
        mask: (b, 1, q, k), True where attention is allowed; None where query i sees keys 0 .. k - q + i: whole chunks
            (q = k), or a long one.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None

    def to(self, device: torch.device | str) -> Block:
        mask = None if self.mask is None else self.mask.to(device)
        return Block(self.queries.to(device), self.keys.to(device), mask)


class TreeLayout:
    """How a row attends: as blocks for SDPA, and, without a sliding window, as paths for one flash call on a GPU.

    Either is worked out when it is first asked for. This is no dataclass on purpose: PyTorch's compiler looks into a
    frozen one, and would compile every layer anew for each row.
    """

    def __init__(
        self,
        paths: Sequence[NDArray[np.int64]],
        chunks: Sequence[int],
        sliding_window: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            paths: packed positions of each sequence's tokens, in order; its last `chunks[i]` are the queries.
            sliding_window: a token sees at most so many tokens, itself included.
        """
        self._paths = paths
        self._chunks = chunks
        self._sliding_window = sliding_window
        self._device = device

    def to(self, device: torch.device | str) -> TreeLayout:
        return TreeLayout(self._paths, self._chunks, self._sliding_window, device)

    @cached_property
    def paths(self) -> Paths | None:
        if self._sliding_window is not None or not any(self._chunks):
            return None
        return build_paths(self._paths, self._chunks).to(self._device)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self._blocks_and_restore[0]

    @property
    def restore(self) -> Tensor:
        """(N,) finds each packed token in the flattened outputs of all blocks."""
        return self._blocks_and_restore[1]

    @cached_property
    def _blocks_and_restore(self) -> tuple[tuple[Block, ...], Tensor]:
        shapes = [(q, len(path)) for q, path in zip(self._chunks, self._paths, strict=True)]
        blocks, restore, offset = [], np.empty(sum(self._chunks), np.int64), 0
        for members in _buckets(shapes):
            q_max, k_max = (max(shapes[i][axis] for i in members) for axis in (0, 1))
            queries = np.zeros((len(members), q_max), np.int64)
            keys = np.zeros((len(members), k_max), np.int64)
            depth = np.zeros((len(members), q_max), np.int64)  # padding sees key 0 alone: no empty softmax
            for row, i in enumerate(members):
                q, k = shapes[i]
                queries[row, :q] = self._paths[i][k - q :]
                keys[row, :k] = self._paths[i]
                depth[row, :q] = np.arange(k - q, k)
                restore[queries[row, :q]] = offset + row * q_max + np.arange(q)
            offset += queries.size
            # Padding of whole chunks comes last, where nothing sees it; a long one is alone and has none.
            causal = self._sliding_window is None and _kind(*shapes[members[0]]) != "short"
            mask = None if causal else _mask(torch.from_numpy(depth), k_max, self._sliding_window)
            blocks.append(Block(torch.from_numpy(queries), torch.from_numpy(keys), mask).to(self._device))
        return tuple(blocks), torch.from_numpy(restore).to(self._device)


def _kind(q: int, k: int) -> Literal["whole", "long", "short"]:
    return "whole" if q == k else "long" if q * k >= _LONG else "short"


def _buckets(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Chunks of one kind and like shape together, as long as the padding costs less than another call.

    A long one stays alone. Empty ones fall away.
    """
    buckets: list[list[int]] = []
    area = q_max = k_max = 0
    kinds = {i: _kind(q, k) for i, (q, k) in enumerate(shapes) if q}
    for i in sorted(kinds, key=lambda i: (kinds[i], shapes[i])):
        q, k = shapes[i]
        padded = max(q, q_max) * max(k, k_max)
        like = buckets and kinds[i] == kinds[buckets[-1][0]] != "long"
        if like and (len(buckets[-1]) + 1) * padded <= area + q * k + _CALL_COST:
            buckets[-1].append(i)
            area, q_max, k_max = area + q * k, max(q, q_max), max(k, k_max)
        else:
            buckets.append([i])
            area, q_max, k_max = q * k, q, k
    return buckets


def _mask(depth: Tensor, k_max: int, sliding_window: int | None) -> Tensor:
    key_depth = torch.arange(k_max)
    mask = key_depth <= depth[:, :, None]
    if sliding_window is not None:
        mask &= key_depth > depth[:, :, None] - sliding_window
    return mask[:, None]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeLayout,
    paths: Paths | None = None,
    scaling: float | None = None,
    by_blocks: Callable[..., Tensor] | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """An attention function of transformers. query (1, H, N, D), key and value (1, KV, N, D) -> (1, N, H, D).

    Args:
        paths: the layout's own, for a GPU. Tensors that PyTorch's compiler sees, where it would not look into `tree`.
        by_blocks: instead of `attend_by_blocks`.
    """
    # Under autocast the rotary embedding leaves query and key in float32, beside a value in the compute type.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # (N, heads, D)
    scale = scaling or q.shape[-1] ** -0.5
    if paths is not None and prefers_varlen(value):
        return varlen_attention(q, k, v, paths, scale)[None], None
    return (by_blocks or attend_by_blocks)(q, k, v, tree, scale)[None], None


def attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, tree: TreeLayout, scale: float) -> Tensor:
    """query (N, H, D), key and value (N, KV, D) -> (N, H, D), a call of PyTorch's a block."""
    queries, keys = [block.queries for block in tree.blocks], [block.keys for block in tree.blocks]
    gathered = zip(_gather(query, queries), _gather(key, keys), _gather(value, keys), tree.blocks, strict=True)
    outputs = [_attend(q, k, v, block.mask, scale).transpose(1, 2).flatten(0, 1) for q, k, v, block in gathered]
    return torch.cat(outputs).index_select(0, tree.restore)


def _gather(x: Tensor, indices: Sequence[Tensor]) -> list[Tensor]:
    """x (N, heads, D), each index (b, n) -> (b, heads, n, D) each. At once, so that backward adds up but once."""
    flat = x.index_select(0, torch.cat([index.flatten() for index in indices]))
    parts = flat.split([index.numel() for index in indices])
    return [part.unflatten(0, index.shape).transpose(1, 2) for part, index in zip(parts, indices, strict=True)]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q (b, H, q, D), k and v (b, KV, k, D), a block's mask -> (b, H, q, D)"""
    if mask is None and prefers_tail_attention(q, k):
        return tail_attention(q, k, v, scale)
    if mask is not None and prefers_block_attention(q, k):
        return block_attention(q, k, v, mask, scale)
    whole = q.shape[2] == k.shape[2]
    if mask is None and not whole:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def register_tree_attention(function: Callable[..., tuple[Tensor, None]] = tree_attention) -> None:
    """Make `model.set_attn_implementation(TREE_ATTENTION)` possible. The mask is the layout's: none is built."""
    AttentionInterface.register(TREE_ATTENTION, function)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)
