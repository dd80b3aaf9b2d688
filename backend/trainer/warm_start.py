"""Supervised fine-tuning on recorded sequences: cross-entropy on their action tokens, packed as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from sparring.backend.trainer.packing import pack, split_rows
from sparring.backend.trainer.step import make_sample
from sparring.errors import TrainerError
from sparring.types import TokenSequence

__all__ = ["warm_start"]


def warm_start(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    *,
    steps: int,
    lr: float,
    batch_size: int,
    token_budget: int = 4096,
    seed: int = 0,
    max_grad_norm: float = 1.0,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train a model (with the head of `install_head`) in place: warm-up over a tenth of the steps, then a cosine.

    Returns:
        The loss of each step, in nats a token, before its update.

    Raises:
        TrainerError: there is nothing to learn from, or a loss is not finite.
    """
    samples = [
        make_sample(s, np.ones(len(s.turns)), version=0, index=i, name=f"sequence {i} of the supervised steps")
        for i, s in enumerate(sequences)
        if s.action_mask.any()
    ]
    if not samples:
        raise TrainerError("supervised steps: no sequence has an action token to learn")
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warmup, 0.5 + 0.5 * float(np.cos(np.pi * max(0, i - warmup) / max(1, steps - warmup)))),
    )
    generator = np.random.default_rng(seed)
    order: list[int] = []
    losses = []
    model.train()
    for step in range(steps):
        while len(order) < min(batch_size, len(samples)):
            order += generator.permutation(len(samples)).tolist()
        batch, order = [samples[i] for i in order[:batch_size]], order[batch_size:]
        tokens = sum(int(s.action_mask.sum()) for s in batch)
        total = 0.0
        for members in split_rows(batch, token_budget):
            row = pack(members).to(device)
            loss = -model(row=row).logprobs.sum() / tokens
            loss.backward()
            total += float(loss.detach())
        if not np.isfinite(total):
            raise TrainerError(f"supervised steps: the loss of step {step} is {total}; lower the learning rate")
        torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(total)
        if on_step is not None:
            on_step(step, total)
    return losses
