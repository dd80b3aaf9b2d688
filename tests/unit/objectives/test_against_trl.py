"""objectives.md, test 3: losses and gradients against TRL's own GRPOTrainer, on the same tensors.

Its `_compute_loss` runs as it is; what it would get from a model are our tensors.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from sparring.backend.objectives import load_objective

LENGTHS = (4, 7, 2, 5)
T = max(LENGTHS)


class One:
    """accelerate's face of one process."""

    num_processes = 1
    device = torch.device("cpu")

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction="sum"):
        return tensor


def trl_loss(x, loss_type, **settings):
    """The loss that TRL computes for the flat inputs `x`, one micro-batch, padded as it wants them."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=True,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    attributes = {
        "args": args,
        "accelerator": One(),
        "model": SimpleNamespace(training=True),
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 1024,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
    } | settings
    for name, value in attributes.items():
        object.__setattr__(trainer, name, value)

    def padded(flat):
        rows = [torch.nn.functional.pad(part, (0, T - len(part))) for part in flat.split(LENGTHS)]
        return torch.stack(rows)

    mask = padded(torch.ones(sum(LENGTHS), dtype=torch.long))
    logprobs = padded(x.logprobs)
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None)
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(len(LENGTHS), T, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.stack([part[0] for part in x.advantages.split(LENGTHS)]),
        "old_per_token_logps": padded(x.behaviour),
        "num_items_in_batch": mask.sum(),
    }
    if x.reference is not None:
        inputs["ref_per_token_logps"] = padded(x.reference)
    return trainer._compute_loss(None, inputs)


CASES = [
    ("grpo", {}, "grpo", {}),
    ("dapo", {}, "dapo", {"epsilon_high": 0.28}),
    ("dr_grpo", {}, "dr_grpo", {}),
    ("gspo", {}, "grpo", {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    ("cispo", {"clip_high": 0.5}, "cispo", {"epsilon_high": 1.5}),  # TRL's cap is absolute
    ("sapo", {}, "sapo", {}),
    ("grpo", {"kl": "k3", "kl_coefficient": 0.04}, "grpo", {"beta": 0.04}),
]


@pytest.mark.parametrize("drift", [0.0, 1e-4, 0.02, 0.5])
@pytest.mark.parametrize(("name", "kwargs", "loss_type", "settings"), CASES, ids=lambda v: v if v != {} else "")
def test_objectives_3_the_loss_is_trls_on_the_same_tensors(kit, name, kwargs, loss_type, settings, drift):
    reference = -3 * torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = kit.make_inputs(seed=3, lengths=LENGTHS, drift=drift, reference=reference if "kl" in kwargs else None)
    ours, theirs = load_objective(name, kwargs).loss(x).loss, trl_loss(x, loss_type, **settings)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6, rel=1e-6)
    (gradient,), (expected,) = (torch.autograd.grad(loss, x.logprobs) for loss in (ours, theirs))
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    assert gradient.abs().max() > 0 or name == "gspo"  # far off-policy, its narrow clip takes every gradient
