"""The optimizer of the master weights and its learning rate."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sparring.config import TrainerConfig
from sparring.errors import ConfigError
from sparring.extras import missing

__all__ = ["check_optimizer", "make_optimizer", "plain_optimizer", "rate_factor"]


def check_optimizer(knobs: TrainerConfig) -> None:
    """
    Raises:
        ConfigError: its package is not installed; it says how to.
    """
    if knobs.optimizer == "adamw_8bit" and (lack := missing(["bitsandbytes"], "trainer.optimizer=adamw_8bit")):
        raise ConfigError(lack)


def make_optimizer(
    model: PreTrainedModel, knobs: TrainerConfig
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Over what is trained of the model: a frozen base has no state. The rate warms up, then follows its schedule.

    Raises:
        ConfigError: as `check_optimizer`.
    """
    check_optimizer(knobs)
    trained = [p for p in model.parameters() if p.requires_grad]
    settings: dict[str, Any] = {
        "lr": knobs.learning_rate,
        "betas": knobs.adam_betas,
        "weight_decay": knobs.weight_decay,
    }
    if knobs.optimizer == "adamw_8bit":
        embedding: Any = model.get_input_embeddings()
        optimizer = _adamw_8bit(trained, embedding.weight, settings)
    else:
        optimizer = torch.optim.AdamW(trained, **settings, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, knobs))


def rate_factor(step: int, knobs: TrainerConfig) -> float:
    """What the learning rate is multiplied with in the optimizer step that follows `step` others."""
    if step < knobs.warmup_steps:
        return (step + 1) / (knobs.warmup_steps + 1)
    falling = knobs.steps - knobs.warmup_steps  # all that follow the warm-up, where fewer than `decay_steps` do
    falling = max(1, min(falling, knobs.decay_steps or falling))
    left = min(1.0, max(0.0, (knobs.steps - step) / falling))
    return {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[knobs.schedule]


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _adamw_8bit(
    trained: list[nn.Parameter], embedding: torch.Tensor, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """AdamW whose moments are bytes, in blocks with a scale each (arXiv:2110.02861), by bitsandbytes.

    In float32 stay those of parameters below 4,096 elements, and of the embedding, as the paper advises: some words
    are rare, and their gradients far larger than others.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # about 4-bit kernels, which are unused
    from bitsandbytes.optim import AdamW8bit

    class Optimizer(AdamW8bit):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            wide = {"optim_bits": 32} if group["params"][pindex] is embedding else {}
            return {**super().get_config(gindex, pindex, group), **wide}

    optimizer: torch.optim.Optimizer = Optimizer(trained, **settings)
    return optimizer
