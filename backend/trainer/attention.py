"""Exact attention over a prefix tree by PyTorch's own SDPA: no kernel from a hub, any device.

A row holds one chunk of queries a sequence; its keys are the sequence's whole path through the tree. Chunks of like
size are padded into one batched call; a chunk without a prefix (q = k) is plain causal attention and needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from sparring.backend.trainer.block_attention import block_attention, prefers_block_attention
from sparring.backend.trainer.varlen_attention import Paths, build_paths, prefers_varlen, varlen_attention

__all__ = ["TREE_ATTENTION", "Block", "TreeLayout", "build_layout", "register_tree_attention", "tree_attention"]

TREE_ATTENTION = "sparring_tree"

# One more SDPA call and its gathers cost about as much as so many query-key products (measured on a CPU, SmolLM2).
_CALL_COST = 20_000


@dataclass(frozen=True, eq=False)
class Block:
    """One SDPA call of b chunks, padded to q queries and k keys.

    Attributes:
        queries: (b, q) packed positions. keys: (b, k) packed positions. Padding points at position 0.
        mask: (b, 1, q, k), True where attention is allowed; None where all chunks are whole and causal (q = k).
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """How a row attends: as blocks for SDPA, and, without a sliding window, as paths for one flash call on a GPU.

    `restore` (N,) finds each packed token in the flattened outputs of all blocks.
    """

    blocks: tuple[Block, ...]
    restore: Tensor
    paths: Paths | None = None

    def to(self, device: torch.device | str) -> TreeLayout:
        blocks = tuple(
            Block(b.queries.to(device), b.keys.to(device), None if b.mask is None else b.mask.to(device))
            for b in self.blocks
        )
        return TreeLayout(blocks, self.restore.to(device), None if self.paths is None else self.paths.to(device))


def build_layout(
    paths: Sequence[NDArray[np.int64]], chunks: Sequence[int], sliding_window: int | None = None
) -> TreeLayout:
    """Group the chunks of a row into SDPA calls.

    Args:
        paths: packed positions of each sequence's tokens, in order; its last `chunks[i]` are the queries.
        sliding_window: a token sees at most so many tokens, itself included.
    """
    shapes = [(q, len(path)) for q, path in zip(chunks, paths, strict=True)]
    blocks, restore, offset = [], np.empty(sum(chunks), np.int64), 0
    for members in _buckets(shapes):
        q_max, k_max = (max(shapes[i][axis] for i in members) for axis in (0, 1))
        queries = np.zeros((len(members), q_max), np.int64)
        keys = np.zeros((len(members), k_max), np.int64)
        depth = np.zeros((len(members), q_max), np.int64)  # padding sees key 0 alone: no empty softmax
        for row, i in enumerate(members):
            q, k = shapes[i]
            queries[row, :q] = paths[i][k - q :]
            keys[row, :k] = paths[i]
            depth[row, :q] = np.arange(k - q, k)
            restore[queries[row, :q]] = offset + row * q_max + np.arange(q)
        offset += queries.size
        causal = sliding_window is None and all(q == k for q, k in (shapes[i] for i in members))  # padding comes last
        blocks.append(
            Block(
                torch.from_numpy(queries),
                torch.from_numpy(keys),
                None if causal else _mask(torch.from_numpy(depth), k_max, sliding_window),
            )
        )
    return TreeLayout(
        tuple(blocks),
        torch.from_numpy(restore),
        build_paths(paths, chunks) if sliding_window is None and any(chunks) else None,
    )


def _buckets(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Chunks of like shape together, as long as the padding costs less than another call. Empty chunks fall away."""
    buckets: list[list[int]] = []
    area = q_max = k_max = 0
    filled = [i for i, (q, _) in enumerate(shapes) if q]
    for i in sorted(filled, key=lambda i: (shapes[i][0] == shapes[i][1], shapes[i])):
        q, k = shapes[i]
        whole = q == k
        padded = max(q, q_max) * max(k, k_max)
        fits = buckets and (len(buckets[-1]) + 1) * padded <= area + q * k + _CALL_COST
        if fits and whole == (shapes[buckets[-1][0]][0] == shapes[buckets[-1][0]][1]):
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
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """An attention function of transformers. query (1, H, N, D), key and value (1, KV, N, D) -> (1, N, H, D)."""
    # Under autocast the rotary embedding leaves query and key in float32, beside a value in the compute type.
    tokens = [x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value)]  # (N, heads, D)
    if tree.paths is not None and prefers_varlen(value):
        q, k, v = tokens
        return varlen_attention(q, k, v, tree.paths, scaling or q.shape[-1] ** -0.5)[None], None
    grouped = query.size(1) != key.size(1)
    outputs = []
    for block in tree.blocks:
        q, k, v = (
            x.index_select(0, index.reshape(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2)
            for x, index in zip(tokens, (block.queries, block.keys, block.keys), strict=True)
        )
        if block.mask is not None and prefers_block_attention(q, k):
            out = block_attention(q, k, v, block.mask, scaling or q.shape[-1] ** -0.5)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=block.mask, is_causal=block.mask is None, scale=scaling, enable_gqa=grouped
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, tree.restore)[None], None


def register_tree_attention(function: Callable[..., tuple[Tensor, None]] = tree_attention) -> None:
    """Make `model.set_attn_implementation(TREE_ATTENTION)` possible. The mask is the layout's: none is built."""
    AttentionInterface.register(TREE_ATTENTION, function)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)
