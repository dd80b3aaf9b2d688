"""Attention over a prefix tree on a GPU: one call of PyTorch's own variable-length flash attention a layer.

Chunk i's queries are the last q_i tokens of its path of k_i keys. Flash attention's causal mask is aligned to the end
of both, which is just that. So nothing is padded and no mask exists; keys are gathered along the paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Paths", "build_paths", "prefers_varlen", "varlen_attention"]


class Paths(NamedTuple):
    """C chunks of a row, laid end to end.

    Attributes:
        keys: (K,) packed position of each key, path after path; None where the row shares nothing, so K = N.
        ends_q, ends_k: (C + 1,) int32, where each chunk's queries and keys begin and end.
        longest_q, longest_k: of one chunk.
    """

    keys: Tensor | None
    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int

    def to(self, device: torch.device | str) -> Paths:
        keys = None if self.keys is None else self.keys.to(device)
        return Paths(keys, self.ends_q.to(device), self.ends_k.to(device), self.longest_q, self.longest_k)


def build_paths(paths: Sequence[NDArray[np.int64]], chunks: Sequence[int]) -> Paths:
    """
    Args:
        paths: packed positions of each sequence's tokens; its last `chunks[i]` are the queries, and the queries of all
            sequences, in order, are the row.
    """
    filled = [(path, q) for path, q in zip(paths, chunks, strict=True) if q]
    lengths_q, lengths_k = [q for _, q in filled], [len(path) for path, _ in filled]
    shared = lengths_q != lengths_k
    return Paths(
        keys=torch.from_numpy(np.concatenate([path for path, _ in filled])) if shared else None,
        ends_q=torch.from_numpy(np.cumsum([0, *lengths_q], dtype=np.int32)),
        ends_k=torch.from_numpy(np.cumsum([0, *lengths_k], dtype=np.int32)),
        longest_q=max(lengths_q),
        longest_k=max(lengths_k),
    )


def prefers_varlen(value: Tensor) -> bool:
    return value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) and value.shape[-1] <= 256


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, paths: Paths, scale: float) -> Tensor:
    """query (N, H, D), key and value (N, KV, D), H a multiple of KV -> (N, H, D)."""
    if paths.keys is not None:
        key, value = key.index_select(0, paths.keys), value.index_select(0, paths.keys)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        paths.ends_q,
        paths.ends_k,
        paths.longest_q,
        paths.longest_k,
        0.0,
        True,
        False,
        scale=scale,
    )[0]
    return out
