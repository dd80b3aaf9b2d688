"""Checksums of a model's parameters that trainer and server can compare, though the server joins some of them.

Also loaded by `launcher.py` inside SGLang's own Python, so it imports nothing of sparring.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["ACTION", "parameter_checksums"]

ACTION = "sparring_checksums"  # of `/weights_checker`, on a server that `launcher.py` started
_CHUNK_BYTES = 64 * 2**20
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Rows: TypeAlias = tuple[torch.device, int]  # where they lie, and of how many words each is
_MIX = (-7046029254386353131, -4658895280553007687)  # 64-bit constants of splitmix64


@torch.no_grad()
def parameter_checksums(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, str]]:
    """Checksum and type of each tensor, by its bits.

    The checksum of a matrix is the sum, modulo 2^64, of one hash for each row. So that of several matrices stacked on
    each other, as a server holds the projections to queries, keys and values, is the sum of theirs, and rows of zeros,
    with which a server fills up a vocabulary, add nothing. A change within one row is always seen, any other with
    probability 1 - 2^-64; only the order of whole rows is not. An element of a vector counts as a row.

    Tensors of equal rows go together, and there is one wait for a GPU in all: some ten operations for each tensor, each
    of which waits for a busy interpreter, made an update of a small model take seconds. Temporary memory is 128 MiB.
    """
    weights: dict[_Rows, Tensor] = {}
    waiting: dict[_Rows, list[tuple[str, Tensor]]] = {}
    kinds: dict[str, str] = {}
    sums: dict[str, Tensor] = {}
    for name, tensor in named:
        words = _words(tensor.data)  # plain, where a parameter is of a class of its own
        rows = words.device, words.shape[1]
        if rows not in weights:
            weights[rows] = _odd_weights(words.shape[1], words.device)
        kinds[name] = str(tensor.dtype).removeprefix("torch.")
        together = waiting.setdefault(rows, [])
        if together and _bytes(words) + sum(_bytes(each) for _, each in together) > _CHUNK_BYTES:
            sums |= _sums_of_hashes(together, weights[rows])
            together.clear()
        together.append((name, words))
    for rows, together in waiting.items():
        sums |= _sums_of_hashes(together, weights[rows])
    values: list[int] = torch.stack([sums[name] for name in kinds]).tolist() if kinds else []
    return {name: (value, kind) for (name, kind), value in zip(kinds.items(), values, strict=True)}


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


def _sums_of_hashes(named: list[tuple[str, Tensor]], weights: Tensor) -> dict[str, Tensor]:
    words = named[0][1] if len(named) == 1 else torch.cat([each for _, each in named])
    parts = words.split(max(1, _CHUNK_BYTES // (8 * words.shape[1])))
    hashes = torch.cat([_mixed((part.to(torch.int64) * weights).sum(dim=1)) for part in parts])
    of_each = hashes.split([len(each) for _, each in named])
    return {name: part.sum() for (name, _), part in zip(named, of_each, strict=True)}


def _bytes(words: Tensor) -> int:
    """As 64-bit integers."""
    return 8 * words.numel()


def _mixed(values: Tensor) -> Tensor:
    """A bijection of 64-bit integers that is far from linear and keeps zero."""
    values = (values ^ (values >> 29)) * _MIX[0]
    values = (values ^ (values >> 32)) * _MIX[1]
    return values ^ (values >> 31)
