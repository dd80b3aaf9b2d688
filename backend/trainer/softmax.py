"""What the head does with a chunk of logits, in float32: on a GPU each function is one or two passes over it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SoftmaxPasses", "softmax_passes"]

_log = logging.getLogger(__name__)


class SoftmaxPasses(NamedTuple):
    """Functions of a chunk of logits (R, V), before temperature, which they may overwrite.

    Attributes:
        statistics: (logits, inverse_temperature (R,)) -> log of the softmax's denominator (R,), entropy (R,).
        gradient: (logits, lse (R,), scale (R,), inverse_temperature (R,), dtype) -> -scale * softmax, (R, V) in
            `dtype`: d(log p_t) / d(logits) but for what the chosen token t adds.
    """

    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


def softmax_passes(device_type: str) -> SoftmaxPasses:
    """Written in place, so that a chunk is there once; on a GPU fused by PyTorch's compiler, where it works."""
    return _fused() if device_type == "cuda" else _IN_PLACE


def _statistics_in_place(logits: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    logits.mul_(inverse_temperature[:, None])
    top = logits.amax(-1, keepdim=True)
    p = (logits - top).exp_()
    total = p.sum(-1)
    lse = top.squeeze(-1) + total.log()
    return lse, lse - torch.bmm(p.unsqueeze(1), logits.unsqueeze(2)).flatten() / total


def _gradient_in_place(
    logits: Tensor, lse: Tensor, scale: Tensor, inverse_temperature: Tensor, dtype: torch.dtype
) -> Tensor:
    scaled = logits.mul_(inverse_temperature[:, None])
    return scaled.sub_(lse[:, None]).exp_().mul_(-scale[:, None]).to(dtype)


def _statistics(logits: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    scaled = logits * inverse_temperature[:, None]
    top = scaled.amax(-1, keepdim=True)
    p = (scaled - top).exp()
    total = p.sum(-1)
    lse = top.squeeze(-1) + total.log()
    return lse, lse - (p * scaled).sum(-1) / total


def _gradient(logits: Tensor, lse: Tensor, scale: Tensor, inverse_temperature: Tensor, dtype: torch.dtype) -> Tensor:
    return ((logits * inverse_temperature[:, None] - lse[:, None]).exp() * -scale[:, None]).to(dtype)


_IN_PLACE = SoftmaxPasses(_statistics_in_place, _gradient_in_place)


@functools.cache
def _fused() -> SoftmaxPasses:
    passes = SoftmaxPasses(torch.compile(_statistics), torch.compile(_gradient))
    logits, one = torch.zeros(2, 8, device="cuda"), torch.ones(2, device="cuda")
    try:
        lse, _ = passes.statistics(logits, one)
        passes.gradient(logits, lse, one, one, torch.bfloat16)
    except Exception as error:  # whatever compiler or driver is amiss: the same numbers, slower
        _log.warning("the trainer's head runs unfused, slower: PyTorch's compiler does not work here: %s", error)
        return _IN_PLACE
    return passes
