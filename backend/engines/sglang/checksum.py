"""Checksums of a model's parameters that trainer and server can compare, though the server joins some of them.

Also loaded by `launcher.py` inside SGLang's own Python, so it imports nothing of sparring.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["ACTION", "parameter_checksums"]

ACTION = "sparring_checksums"  # of `/weights_checker`, on a server that `launcher.py` started
_CHUNK_BYTES = 64 * 2**20
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (-7046029254386353131, -4658895280553007687)  # 64-bit constants of splitmix64


@torch.no_grad()
def parameter_checksums(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, str]]:
    """Checksum and type of each tensor, by its bits.

    The checksum of a matrix is the sum, modulo 2^64, of one hash for each row. So that of several matrices stacked on
    each other, as a server holds the projections to queries, keys and values, is the sum of theirs, and rows of zeros,
    with which a server fills up a vocabulary, add nothing. A change within one row is always seen, any other with
    probability 1 - 2^-64; only the order of whole rows is not. An element of a vector counts as a row.

    One wait for a GPU in all; temporary memory is 64 MiB.
    """
    weights: dict[tuple[torch.device, int], Tensor] = {}
    names, kinds, sums = [], [], []
    for name, tensor in named:
        words = _words(tensor.data)  # plain, where a parameter is of a class of its own
        key = words.device, words.shape[1]
        if key not in weights:
            weights[key] = _odd_weights(words.shape[1], words.device)
        names.append(name)
        kinds.append(str(tensor.dtype).removeprefix("torch."))
        sums.append(_sum_of_hashes(words, weights[key]))
    values: list[int] = torch.stack(sums).tolist() if sums else []
    return {name: (value, kind) for name, value, kind in zip(names, values, kinds, strict=True)}


def _words(tensor: Tensor) -> Tensor:
    """`[rows, words]`: the bits of each row in the largest integers that divide it."""
    rows = tensor.contiguous().view(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    row_bytes = rows.shape[1] * rows.element_size()
    kind = torch.int64 if row_bytes % 8 == 0 else _WORDS[rows.element_size()]
    if rows.data_ptr() % kind.itemsize or rows.storage_offset() * rows.element_size() % kind.itemsize:
        rows = rows.clone()  # a part of a larger buffer may begin anywhere
    return rows.view(kind)


def _odd_weights(width: int, device: torch.device) -> Tensor:
    """A factor for each place of a row; odd, so that a change of one word changes the row's hash."""
    return _mixed(torch.arange(1, width + 1, device=device, dtype=torch.int64) * _MIX[0]) | 1


def _sum_of_hashes(words: Tensor, weights: Tensor) -> Tensor:
    rows = max(1, _CHUNK_BYTES // (8 * words.shape[1]))
    hashes = [(part.to(torch.int64) * weights).sum(dim=1) for part in words.split(rows)]
    return torch.stack([_mixed(part).sum() for part in hashes]).sum()


def _mixed(values: Tensor) -> Tensor:
    """A bijection of 64-bit integers that is far from linear and keeps zero."""
    values = (values ^ (values >> 29)) * _MIX[0]
    values = (values ^ (values >> 32)) * _MIX[1]
    return values ^ (values >> 31)
