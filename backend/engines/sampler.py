"""From logits to tokens: temperature, top-k, top-p, min-p, and an exact draw by the inverse of the cumulative sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparring.backend.engines.base import SamplingParams

__all__ = ["Draw", "sample"]

_HEAD = 256  # sorted words looked at before a nucleus asks for the whole vocabulary
_LARGEST_BLOCK = 512


@dataclass(frozen=True)
class Draw:
    """One sampled token, its log-probability, and the most probable alternatives where they were asked for."""

    token: int
    logprob: float
    top: list[tuple[int, float]] | None


def sample(logits_BV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[Draw]:
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
    scale_B1 = torch.tensor([[1 / p.temperature if p.temperature > 0 else 1.0] for p in params], device=device)
    z_BV = logits_BV * scale_B1  # float32, since the scale is
    if len(filtered) == len(params):
        z_BV = _filter(z_BV, params)
    elif filtered:
        z_BV[filtered] = _filter(z_BV[filtered], [params[row] for row in filtered])
    p_BV = torch.softmax(z_BV, -1)
    tokens_B = _inverse_cdf(p_BV, torch.tensor(uniforms, dtype=torch.float64, device=device))
    if greedy:
        tokens_B[greedy] = p_BV[greedy].argmax(-1)
    logprobs = p_BV.gather(-1, tokens_B[:, None])[:, 0].double().log().tolist()
    most = max(p.top_logprobs for p in params)
    tops: list[list[tuple[int, float]] | None] = [None] * len(params)
    if most:
        top_p, top_ids = p_BV.topk(min(most, p_BV.shape[-1]), -1)
        for row, (ids, values) in enumerate(zip(top_ids.tolist(), top_p.double().log().tolist(), strict=True)):
            if n := params[row].top_logprobs:
                tops[row] = list(zip(ids[:n], values[:n], strict=True))
    return [Draw(*drawn) for drawn in zip(tokens_B.tolist(), logprobs, tops, strict=True)]


def _filter(z_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set to -inf what top-k, top-p and min-p leave out."""
    device, vocabulary = z_BV.device, z_BV.shape[-1]
    min_p_B1 = torch.tensor([[math.log(p.min_p) if p.min_p > 0 else -math.inf] for p in params], device=device)
    if all(p.top_k == 0 and p.top_p >= 1 for p in params):
        return z_BV.masked_fill(z_BV < z_BV.amax(-1, keepdim=True) + min_p_B1, -math.inf)
    top_k = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    top_k_B1 = torch.tensor(top_k, device=device)[:, None]
    top_p_B1 = torch.tensor([[p.top_p if p.top_p < 1 else math.inf] for p in params], device=device)
    every_lse_B1 = z_BV.logsumexp(-1, keepdim=True)
    width = min(vocabulary, max([_HEAD, *(k for k in top_k if k < vocabulary)]))
    while True:
        values, ids = z_BV.topk(width, -1) if width < vocabulary else z_BV.sort(-1, descending=True)
        values = values.masked_fill(torch.arange(width, device=device) >= top_k_B1, -math.inf)
        lse_B1 = torch.where(top_k_B1 < vocabulary, values.logsumexp(-1, keepdim=True), every_lse_B1)
        p = (values - lse_B1).exp()
        mass = p.cumsum(-1)
        # rows of top-k alone, and rows whose nucleus the head covers, need no more of the vocabulary
        uncovered = (top_k_B1 == vocabulary) & (mass[:, -1:] < top_p_B1)
        if width == vocabulary or not bool(uncovered.any()):
            break
        width = vocabulary
    keep = ((mass - p) < top_p_B1) & (values >= values[:, :1] + min_p_B1)
    return torch.full_like(z_BV, -math.inf).scatter_(-1, ids, values.masked_fill(~keep, -math.inf))


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
