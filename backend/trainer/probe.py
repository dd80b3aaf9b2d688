"""The start-up probe: do trainer and engine give the same tokens the same log-probabilities?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from sparring.backend.trainer.packing import pack, split_rows
from sparring.backend.trainer.step import make_sample
from sparring.config import RunConfig
from sparring.errors import TrainerError
from sparring.types import TokenSequence

__all__ = ["DEFAULT_MAX_DRIFT", "DriftReport", "probe"]

DEFAULT_MAX_DRIFT = {"bfloat16": 0.1, "float32": 0.001}


@dataclass(frozen=True)
class DriftReport:
    """|log p of the trainer − log p of the engine| over the action tokens of the probed sequences, in nats."""

    mean: float
    max: float
    tokens: int


@torch.no_grad()
def probe(
    model: nn.Module, sequences: Sequence[TokenSequence], config: RunConfig, *, device: torch.device | str = "cpu"
) -> DriftReport:
    """Score sequences that the engine sampled under the trainer's own weights.

    Raises:
        TrainerError: nothing to compare, or the mean exceeds `trainer.max_logprob_drift`; it names likely causes.
    """
    samples = [
        make_sample(s, np.zeros(len(s.turns)), version=0, index=i, name=f"probe {i}")
        for i, s in enumerate(sequences)
        if s.action_mask.any()
    ]
    if not samples:
        raise TrainerError("the start-up probe got no sampled token from the engine: does it answer at all?")
    differences = []
    for members in split_rows(samples, config.trainer.token_budget):
        row = pack(members).to(device)
        differences.append((model(row=row).logprobs - row.behaviour_logprobs).abs().double().cpu())
    delta = torch.cat(differences)
    report = DriftReport(mean=float(delta.mean()), max=float(delta.max()), tokens=delta.numel())
    dtypes = (config.trainer.dtype, config.engine.dtype)
    kind = "bfloat16" if "bfloat16" in dtypes else "float32"
    limit = config.trainer.max_logprob_drift or DEFAULT_MAX_DRIFT[kind]
    if not report.mean <= limit:
        raise TrainerError(
            f"trainer and engine disagree on the log-probability of sampled tokens: |Δ| mean {report.mean:.4g}, "
            f"max {report.max:.4g} over {report.tokens} tokens, limit {limit:g} (trainer.max_logprob_drift). "
            "Likely causes: the engine samples at another temperature, or with top-p, top-k or min-p, than it "
            "records; it serves other weights than the trainer's; another tokenizer or chat template; another "
            f"compute type (trainer {config.trainer.dtype}, engine {config.engine.dtype}); an attention or position "
            "encoding that differs from transformers'"
        )
    return report
