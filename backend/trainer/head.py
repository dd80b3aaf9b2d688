"""The language-model head on the trained positions alone, its logits never all there at once.

`install_head(model)` gives a causal language model a second forward: `model(row=PackedRow)` returns `Scores`. It stays
the model's own `forward`, so that wrappers around the model (DDP, FSDP2, PEFT) see the call.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparring.backend.trainer.attention import TREE_ATTENTION, register_tree_attention
from sparring.backend.trainer.packing import PackedRow
from sparring.backend.trainer.softmax import softmax_passes
from sparring.errors import ConfigError

__all__ = ["Scores", "chunked_logprobs", "install_head"]

# Logits of one chunk: 2^24 float32 are 64 MiB. A GPU needs more rows at once to be busy: 2^29 are 2 GiB.
_CHUNK_ELEMENTS = 1 << 24
_CHUNK_ELEMENTS_CUDA = 1 << 29

# What some architectures do to their logits beyond the head's product; scoring without it would be silently wrong.
_LOGIT_EXTRAS = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


@dataclass(frozen=True, eq=False)
class Scores:
    """logprobs (M,) of the action tokens, with gradient; entropy (U,) of the scored distributions, without.

    `hidden` (U, D) are the last states at the scored positions, with gradient.
    """

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inverse_temperature: Tensor,
        term_row: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        hidden_c, weight_c = hidden.to(dtype), weight.to(dtype)
        wide = torch.promote_types(torch.float32, hidden.dtype)
        logprobs = torch.empty(targets.shape, dtype=wide, device=hidden.device)
        lse = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        entropy = torch.empty_like(lse)
        passes = softmax_passes(hidden.device.type)
        for rows, terms in _chunks(hidden.shape[0], weight.shape[0], term_row):
            logits, scale = _logits(hidden_c[rows], weight_c, bias, wide), inverse_temperature[rows].to(wide)
            local = term_row[terms] - rows.start
            chosen = logits[local, targets[terms]] * scale[local]
            lse[rows], entropy[rows] = passes.statistics(logits, scale)
            logprobs[terms] = chosen - lse[rows][local]
            del logits
        ctx.save_for_backward(hidden, weight, bias, inverse_temperature, term_row, targets, lse, logprobs)
        ctx.dtype = dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, inverse_temperature, term_row, targets, lse, logprobs = ctx.saved_tensors
        hidden_c, weight_c = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        wide = lse.dtype
        scale = inverse_temperature.to(wide)
        # d log p_t / d logits = 1[t] - p, summed over the terms of a row. At a chosen token both parts nearly cancel
        # where the policy is sure of it, so they are added before anything is rounded.
        row_grad = torch.zeros_like(lse).index_add_(0, term_row, grad)
        chosen_grad = (
            _over_same_choice(grad, term_row * len(weight) + targets) - row_grad[term_row] * logprobs.exp()
        ).mul_(scale[term_row])
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if bias is not None else None
        passes = softmax_passes(hidden.device.type)
        for rows, terms in _chunks(hidden.shape[0], weight.shape[0], term_row):
            logits = _logits(hidden_c[rows], weight_c, bias, wide)
            grad_logits = passes.gradient(logits, lse[rows], row_grad[rows] * scale[rows], scale[rows], ctx.dtype)
            del logits
            grad_logits[term_row[terms] - rows.start, targets[terms]] = chosen_grad[terms].to(ctx.dtype)
            grad_hidden[rows] = (grad_logits @ weight_c).to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, hidden_c[rows])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
            del grad_logits  # before the next chunk is there
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inverse_temperature: Tensor,
    term_row: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M,) of `targets` under softmax(hidden[term_row] @ weight.T / temperature), and entropies (U,).

    The softmax is in float32 (float64 for float64 input), the head's product in `dtype`. `hidden` is (U, D), `weight`
    (V, D), `term_row` (M,). Backward computes the logits again, so the peak is one chunk of them.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, bias, inverse_temperature, term_row, targets, dtype)
    return logprobs, entropy


def _over_same_choice(grad: Tensor, choice: Tensor) -> Tensor:
    """Each term's gradient (M,), summed with those of all terms that chose the same token of the same row."""
    _, choice = choice.unique(return_inverse=True)
    return torch.zeros_like(grad).index_add_(0, choice, grad)[choice]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    logits = _product(hidden, weight.T, wide)
    return logits if bias is None else logits.add_(bias)


def _add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """total += grad_logits.T @ hidden, without a second matrix of the weight's size."""
    if _is_half_on_gpu(hidden) and total.dtype is torch.float32:
        torch.addmm(total, grad_logits.T, hidden, out_dtype=torch.float32, out=total)
        return
    size = max(1, _CHUNK_ELEMENTS // 4 // hidden.shape[1])
    for start in range(0, total.shape[0], size):
        words = slice(start, start + size)
        total[words] += _product(grad_logits[:, words].T, hidden, total.dtype)


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a @ b in `wide`. On a GPU the sums of a half-precision product are never rounded to half precision."""
    if _is_half_on_gpu(a) and wide is torch.float32:
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def _is_half_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def _chunks(rows: int, vocabulary: int, term_row: Tensor) -> list[tuple[slice, Tensor]]:
    """Slices of rows, each with the indices of the loss terms that read one of them."""
    size = max(1, (_CHUNK_ELEMENTS_CUDA if term_row.is_cuda else _CHUNK_ELEMENTS) // vocabulary)
    order = term_row.argsort(stable=True)
    starts = list(range(0, rows, size))
    bounds = torch.searchsorted(term_row[order], torch.tensor([*starts, rows], device=term_row.device)).tolist()
    return [(slice(s, min(s + size, rows)), order[a:b]) for s, a, b in zip(starts, bounds, bounds[1:], strict=False)]


def install_head(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Give `model` the forward over packed rows, under autocast to `compute_dtype` where that is not the weights' own.

    Raises:
        ConfigError: the architecture scales or caps its logits, or mixes tokens by something else than attention.
    """
    text_config = model.config.get_text_config()
    for name in _LOGIT_EXTRAS:
        if getattr(text_config, name, None) not in (None, 1.0):
            raise ConfigError(f"{type(model).__name__} changes its logits ({name}), which the trainer cannot do yet")
    layers = set(getattr(text_config, "layer_types", None) or []) - {"full_attention"}
    if layers or getattr(text_config, "use_sliding_window", False):
        raise ConfigError(
            f"{type(model).__name__} has layers {sorted(layers) or ['sliding_attention']}; tree packing needs full "
            "attention in every layer"
        )
    register_tree_attention()
    model.set_attn_implementation(TREE_ATTENTION)
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel, *args: Any, row: PackedRow | None = None, head: bool = True, **kwargs: Any
    ) -> Any:
        if row is None:
            return original(*args, **kwargs)
        return _score(self, row, compute_dtype, head)

    model.forward = types.MethodType(forward, model)


def _score(model: PreTrainedModel, row: PackedRow, dtype: torch.dtype, with_head: bool) -> Scores:
    """Without the head, log-probabilities and entropy are empty: a critic needs the states alone."""
    device_type = row.input_ids.device.type
    autocast = torch.autocast(device_type, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16))
    with autocast:
        backbone: Any = model.base_model
        hidden = backbone(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            tree=row.layout,
            paths=row.layout.paths if device_type == "cuda" else None,
        ).last_hidden_state[0]
    hidden = hidden[row.scored]
    if not with_head:
        return Scores(hidden.new_empty(0), hidden.new_empty(0), hidden)
    head: nn.Module = model.get_output_embeddings()
    weight: Any = head.weight  # whole and plain inside this forward, in a sharded model too
    bias: Any = getattr(head, "bias", None)
    head_dtype = dtype if device_type in ("cpu", "cuda") else torch.promote_types(torch.float32, weight.dtype)
    with torch.autocast(device_type, enabled=False):
        logprobs, entropy = chunked_logprobs(
            hidden, weight, bias, row.inverse_temperature, row.term_row, row.targets, head_dtype
        )
    return Scores(logprobs, entropy, hidden)
