"""From logits to tokens: temperature, top-k, top-p, min-p, and an exact draw by the inverse of the cumulative sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparring.backend.engines.base import SamplingParams

__all__ = ["Draw", "Sampler"]

_HEADS = (256, 4096)  # sorted words looked at, for the rows that they suffice, before the whole vocabulary
_LARGEST_BLOCK = 512


@dataclass(frozen=True)
class Draw:
    """One sampled token, its log-probability, and the most probable alternatives where they were asked for."""

    token: int
    logprob: float
    top: list[tuple[int, float]] | None


class Sampler:
    """Draws tokens. It keeps its scratch memory: fresh megabytes a step cost more in page faults than the mathematics.

    One thread calls it; what a call returns is its caller's.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0, 0)

    def draw(self, logits_BV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[Draw]:
        """Draw one token a row, exactly from the distribution that its log-probability is reported under.

        That distribution is softmax(logits / temperature) after top-k, then top-p, then min-p, renormalised. A row of
        temperature 0 takes the most probable token and reports it under temperature 1 without filters.

        Args:
            logits_BV: any floating type.
            uniforms: one number of [0, 1) a row; the same number gives the same token.
        """
        device = logits_BV.device
        greedy = [row for row, p in enumerate(params) if p.temperature == 0]
        filtered = [
            row for row, p in enumerate(params) if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        ]
        z_BV = self._float32(logits_BV)
        z_BV *= torch.tensor([[1 / p.temperature if p.temperature > 0 else 1.0] for p in params], device=device)
        if len(filtered) == len(params):
            z_BV = _filter(z_BV, params)
        elif filtered:
            z_BV[filtered] = _filter(z_BV[filtered], [params[row] for row in filtered])
        p_BV = torch.softmax(z_BV, -1, out=z_BV)
        tokens_B = _inverse_cdf(p_BV, torch.tensor(uniforms, dtype=torch.float64, device=device))
        if greedy:
            tokens_B[greedy] = p_BV[greedy].argmax(-1)
        logprobs = p_BV.gather(-1, tokens_B[:, None])[:, 0].double().log().tolist()
        return [Draw(*drawn) for drawn in zip(tokens_B.tolist(), logprobs, _alternatives(p_BV, params), strict=True)]

    def _float32(self, logits_BV: Tensor) -> Tensor:
        rows, vocabulary = logits_BV.shape
        if self._scratch.shape[0] < rows or self._scratch.shape[1] != vocabulary:
            self._scratch = torch.empty(rows, vocabulary, device=logits_BV.device)
        return self._scratch[:rows].copy_(logits_BV)


def _alternatives(p_BV: Tensor, params: Sequence[SamplingParams]) -> list[list[tuple[int, float]] | None]:
    tops: list[list[tuple[int, float]] | None] = [None] * len(params)
    most = max(p.top_logprobs for p in params)
    if most:
        top_p, top_ids = p_BV.topk(min(most, p_BV.shape[-1]), -1)
        for row, (ids, values) in enumerate(zip(top_ids.tolist(), top_p.double().log().tolist(), strict=True)):
            if n := params[row].top_logprobs:
                tops[row] = list(zip(ids[:n], values[:n], strict=True))
    return tops


def _filter(z_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set to -inf, in place, what top-k, top-p and min-p leave out."""
    device, vocabulary = z_BV.device, z_BV.shape[-1]
    min_p_B1 = torch.tensor([[math.log(p.min_p) if p.min_p > 0 else -math.inf] for p in params], device=device)
    if all(p.top_k == 0 and p.top_p >= 1 for p in params):
        return z_BV.masked_fill_(z_BV < z_BV.amax(-1, keepdim=True) + min_p_B1, -math.inf)
    limits = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    top_k_B1 = torch.tensor(limits, device=device)[:, None]
    top_p_B1 = torch.tensor([[p.top_p if p.top_p < 1 else math.inf] for p in params], device=device)
    lse_B1 = z_BV.logsumexp(-1, keepdim=True)
    rows = torch.arange(len(params), device=device)
    for head in (*_HEADS, vocabulary):
        width = min(head, vocabulary)
        top_k, top_p = top_k_B1[rows], top_p_B1[rows]
        values, ids = z_BV[rows].topk(width, -1)
        values.masked_fill_(torch.arange(width, device=device) >= top_k, -math.inf)
        # Within top-k the nucleus is one of the renormalised distribution.
        lse = torch.where(top_k < vocabulary, values.logsumexp(-1, keepdim=True), lse_B1[rows])
        p = (values - lse).exp()
        mass = p.cumsum(-1)
        covered = ((top_k <= width) | (mass[:, -1:] >= top_p))[:, 0]
        keep = ((mass - p) < top_p) & (values >= values[:, :1] + min_p_B1[rows])
        values.masked_fill_(~keep, -math.inf)
        done = rows[covered]
        z_BV[done] = torch.full_like(z_BV[done], -math.inf).scatter_(-1, ids[covered], values[covered])
        rows = rows[~covered]
        if not len(rows):
            break
    return z_BV


def _inverse_cdf(p_BV: Tensor, u_B: Tensor) -> Tensor:
    """The token at which the cumulative probability passes u. In two levels: blocks, then within the block."""
    rows, vocabulary = p_BV.shape
    width = _block_width(vocabulary)
    blocks = p_BV.view(rows, vocabulary // width, width)
    outer = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = _below(u_B[:, None] * outer[:, -1:], outer[:, -1:])
    block = torch.searchsorted(outer, target, right=True).clamp(max=outer.shape[-1] - 1)  # logits may be NaN
    before = torch.where(block > 0, outer.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks[torch.arange(rows, device=p_BV.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(inner, _below(target - before, inner[:, -1:]), right=True)
    return (block * width + offset.clamp(max=width - 1))[:, 0]


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Rounding must not push the target past the last word that has any mass."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _block_width(vocabulary: int) -> int:
    return next(width for width in range(min(_LARGEST_BLOCK, vocabulary), 0, -1) if vocabulary % width == 0)
