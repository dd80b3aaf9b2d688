"""Fusing what is not a matrix product: each decoder layer compiled, once for all of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from sparring.backend.trainer import attention
from sparring.errors import ConfigError

__all__ = ["compile_layers"]


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile every decoder layer for rows of any length. The first rows take a minute; the layers share the code.

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
