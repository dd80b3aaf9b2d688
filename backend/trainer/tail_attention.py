"""Causal attention of a sequence's last q tokens to all its k tokens, in bfloat16 on a CPU.

PyTorch's flash kernel for CPUs multiplies bfloat16 tiles slowly, and behind a prefix it needs a mask, computes what the
mask hides, and keeps the mask in memory for every layer. Here a tile of queries sees its keys up to its own last, as
three plain matrix products; only a tile's last columns are masked. A tile has all the keys of its queries, so its
softmax is whole: no running maximum, and backward recomputes it rather than keep anything of size (q, k).
As in eager attention, scores are rounded to the tensors' type; the softmax itself is computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["prefers_tail_attention", "tail_attention"]

# A tile has 128 queries where the cache holds their scores (2^22 in bfloat16 are 8 MiB, four times in backward) and
# not below 32: few make slow products, and many waste half a square of products at their end.
_SCORES = 1 << 22
_QUERIES = (32, 128)

# Below so many scores the dozen calls of a tile cost more than they save.
_WORTHWHILE = 1 << 17


class _TailAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        q, k, v = _by_key_head(query * scale, key), key.contiguous(), value.contiguous()
        out = torch.empty_like(q)
        for b, tile, keys in _tiles(q, k):
            p = _probabilities(q[b, :, :, tile], k[b, :, keys])
            out[b, :, :, tile] = (p @ v[b, :, keys]).unflatten(1, (q.shape[2], -1))
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        grad_out = _by_key_head(grad, k)
        wide = torch.promote_types(k.dtype, torch.float32)  # many tiles add to each key
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for b, tile, keys in _tiles(q, k):
            p = _probabilities(q[b, :, :, tile], k[b, :, keys])
            q_tile, grad_tile = q[b, :, :, tile].flatten(1, 2), grad_out[b, :, :, tile].flatten(1, 2)
            grad_p = grad_tile @ v[b, :, keys].transpose(1, 2)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
            grad_q[b, :, :, tile] = (grad_scores @ k[b, :, keys]).unflatten(1, (q.shape[2], -1))
            grad_k[b, :, keys] += grad_scores.transpose(1, 2) @ q_tile
            grad_v[b, :, keys] += p.transpose(1, 2) @ grad_tile
        return grad_q.view(grad.shape) * ctx.scale, grad_k.to(k.dtype), grad_v.to(v.dtype), None


def tail_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Query i of q sees keys 0 .. k - q + i: softmax(query @ key.T * scale) @ value with grouped heads.

    Args:
        query: (B, H, q, D). key, value: (B, KV, k, D), H a multiple of KV, k >= q.
    """
    out: Tensor = _TailAttention.apply(query, key, value, scale)
    return out


def prefers_tail_attention(query: Tensor, key: Tensor) -> bool:
    """Whether this is faster than SDPA: bfloat16 on a CPU, and enough scores a sequence."""
    scores = query.shape[1] * query.shape[2] * key.shape[2]
    return query.dtype is torch.bfloat16 and query.device.type == "cpu" and scores >= _WORTHWHILE


def _by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """(B, H, q, D) -> (B, KV, H/KV, q, D)"""
    return query.reshape(len(query), key.shape[1], -1, *query.shape[2:])


def _tiles(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Sequence, queries and keys of each tile."""
    heads, q, k = query.shape[1] * query.shape[2], query.shape[3], key.shape[2]
    least, most = _QUERIES
    for b in range(len(query)):
        start = 0
        while start < q:
            fits = _SCORES // (heads * (k - q + start + most))
            count = -(-(q - start) // min(most, max(least, fits)))  # of equal tiles: no small one is left at the end
            stop = start + -(-(q - start) // count)
            yield b, slice(start, stop), slice(0, k - q + stop)
            start = stop


def _probabilities(query: Tensor, key: Tensor) -> Tensor:
    """(KV, G, r, D), (KV, k, D) -> (KV, G * r, k), where the queries are the last r of the k tokens."""
    r, k = query.shape[2], key.shape[1]
    scores = query.flatten(1, 2) @ key.transpose(1, 2)
    future = torch.ones(r, r, dtype=torch.bool).triu(1)
    scores.unflatten(1, (-1, r))[..., k - r :].masked_fill_(future, float("-inf"))
    return scores.softmax(-1)
