"""TRL's own GRPOTrainer on a group: its loss and log-probabilities, one padded row a sample, nothing shared."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sparring.backend.trainer.packing import Sample
from sparring.backend.trainer.policy import quiet

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

__all__ = ["TrlGrpo"]


class TrlGrpo:
    """`GRPOTrainer._compute_loss` on a trainer that has what it reads, and no more."""

    def __init__(self, path: Path, dtype: torch.dtype, clip: float) -> None:
        with quiet():
            self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.train()
        add_fused_lm_head(self.model, temperature=1.0, outputs=("log_probs", "entropy"))
        autocast = partial(torch.autocast, "cpu", dtype=dtype, enabled=dtype is torch.bfloat16)
        one = SimpleNamespace(
            num_processes=1, is_main_process=True, autocast=autocast,
            reduce=lambda t, reduction: t, gather=lambda t: t,
        )  # fmt: skip
        self.trainer: Any = SimpleNamespace(
            accelerator=one, args=SimpleNamespace(delta=None, steps_per_generation=1), model=self.model,
            loss_type="dapo", beta=0.0, epsilon_low=clip, epsilon_high=clip, importance_sampling_level="token",
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
            _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
            _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        self.trainer._get_per_token_logps_and_entropies = partial(
            GRPOTrainer._get_per_token_logps_and_entropies, self.trainer
        )

    def step(self, samples: Sequence[Sample], prompt: int) -> float:
        """Forward and backward; the loss. All samples are of one length, so that TRL pads nothing either."""
        ids = torch.from_numpy(np.stack([s.token_ids for s in samples]))
        behaviour = torch.from_numpy(np.stack([s.behaviour_logprobs for s in samples]))
        inputs = {
            "prompt_ids": ids[:, :prompt],
            "prompt_mask": torch.ones_like(ids[:, :prompt]),
            "completion_ids": ids[:, prompt:],
            "completion_mask": torch.ones_like(ids[:, prompt:]),
            "old_per_token_logps": behaviour[:, prompt:],
            "advantages": torch.tensor([s.advantages[0] for s in samples], dtype=torch.float32),
            "num_items_in_batch": torch.tensor(float(ids[:, prompt:].numel())),
        }
        loss = GRPOTrainer._compute_loss(self.trainer, self.model, inputs)
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach())
