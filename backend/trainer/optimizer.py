"""The optimizer of the master weights and its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sparring.config import TrainerConfig

__all__ = ["make_optimizer", "plain_optimizer"]


def make_optimizer(
    model: nn.Module, knobs: TrainerConfig
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Over what is trained of the model: a frozen base has no state. The rate rises linearly, then stays."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=knobs.learning_rate, betas=knobs.adam_betas, weight_decay=knobs.weight_decay, fused=True
    )
    warmup = knobs.warmup_steps
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
