"""Loss inputs without a model: the log-probabilities are the leaves that gradients are taken of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparring.backend.objectives import LossInputs, Totals


def make_inputs(
    seed: int = 0, lengths: tuple[int, ...] = (4, 7, 2, 5), drift: float = 0.3, **overrides: Any
) -> LossInputs:
    """A micro-batch that is the whole step: random log-probabilities, one advantage a sequence."""
    generator = torch.Generator().manual_seed(seed)
    n, s = sum(lengths), len(lengths)
    sequence = torch.repeat_interleave(torch.arange(s), torch.tensor(lengths))
    behaviour = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    logprobs = behaviour + drift * torch.randn(n, generator=generator, dtype=torch.float64)
    advantages = torch.randn(s, generator=generator, dtype=torch.float64)[sequence]
    fields = {
        "logprobs": logprobs.requires_grad_(),
        "behaviour": behaviour,
        "advantages": advantages,
        "sequence": sequence,
        "n_sequences": s,
        "lags": torch.zeros(n, dtype=torch.int32),
        "totals": Totals(tokens=n, sequences=s, groups=1),
        "values": torch.zeros(n, dtype=torch.float64, requires_grad=True),
        "old_values": torch.zeros(n, dtype=torch.float64),
        "returns": torch.zeros(n, dtype=torch.float64),
    }
    return LossInputs(**(fields | overrides))


def gradient(loss: Any, inputs: LossInputs) -> torch.Tensor:
    (out,) = torch.autograd.grad(loss(inputs).loss, inputs.logprobs)
    return out


@pytest.fixture
def kit() -> SimpleNamespace:
    return SimpleNamespace(make_inputs=make_inputs, gradient=gradient)
