"""Fusing what is not a matrix product: each decoder layer compiled, once for all of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sparring.backend.trainer import attention
from sparring.backend.trainer.packing import PackedRow, Sample, pack
from sparring.errors import ConfigError

__all__ = ["compile_ahead", "compile_layers"]

_SMALL = 1024  # tokens


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile every decoder layer for rows of any length. The first row takes a minute; the layers share the code.

    Attention along paths is a part of the graph. Attention by blocks, with as many calls as a row needs, is not.

    Raises:
        ConfigError: the architecture keeps its layers elsewhere than in `layers`.
    """
    base: Any = model.base_model
    if not hasattr(base, "layers"):
        raise ConfigError(f"trainer.compile=true: {type(model).__name__} has no list of layers; leave it off")
    by_blocks = torch.compiler.disable(attention.attend_by_blocks)
    attention.register_tree_attention(functools.partial(attention.tree_attention, by_blocks=by_blocks))
    for layer in base.layers:
        layer.compile(dynamic=True, backend=backend)


def compile_ahead(model: PreTrainedModel, device: torch.device | str, token_budget: int) -> None:
    """Have the compiler work now, on made-up rows, and not when the first step is waited for.

    A full row and one as small as what is left of a batch: each gets code of its own.
    """
    model.train()
    vocabulary = model.config.get_text_config().vocab_size
    for tokens in {token_budget, min(token_budget, _SMALL)}:
        model(row=_any_row(vocabulary, tokens).to(device)).logprobs.sum().backward()
        model.zero_grad(set_to_none=True)


def _any_row(vocabulary: int, tokens: int) -> PackedRow:
    """Sequences that share a prompt. No two of the row's sizes are equal: the compiler would take them for one."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, vocabulary, 37)
    samples = []
    for index in range(max(3, tokens // 125)):
        answer = 50 + index % 101
        ids = np.concatenate([prompt, random.integers(0, vocabulary, answer)])
        size = len(ids)
        samples.append(
            Sample(
                token_ids=ids,
                action_mask=np.arange(size) >= len(prompt),
                behaviour_logprobs=np.zeros(size, np.float32),
                advantages=np.zeros(size),
                lags=np.zeros(size, np.int32),
                temperatures=np.ones(size, np.float32),
                index=index,
            )
        )
    return pack(samples)
