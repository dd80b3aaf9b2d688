"""The critic of PPO: values of the states before each action token, and the advantages and returns they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from sparring.backend.objectives.advantages import normalise, per_turn_rewards
from sparring.backend.objectives.base import CriticSpec
from sparring.backend.objectives.gae import gae
from sparring.backend.trainer.head import Scores
from sparring.backend.trainer.packing import PackedRow, Sample, pack
from sparring.backend.trainer.policy import load_policy
from sparring.backend.trainer.step import Step
from sparring.errors import ConfigError, TrainerError
from sparring.types import Group, Trajectory

__all__ = ["Critic", "Targets", "credit_episode", "make_critic"]


@dataclass(frozen=True, eq=False)
class Targets:
    """Of one sequence: old values and returns of its action tokens, in order."""

    values: NDArray[np.float32]
    returns: NDArray[np.float32]


class Critic:
    """A linear layer on the policy's last states, or on those of a model of its own, with an optimizer of its own.

    On the policy's states it learns a probe: they are detached, so the critic never moves the policy.
    """

    def __init__(self, spec: CriticSpec, trunk: Any, hidden_size: int, device: torch.device) -> None:
        self.spec = spec
        self._trunk = trunk
        self._head = nn.Linear(hidden_size, 1, device=device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        parameters = [*self._head.parameters(), *(trunk.parameters() if trunk is not None else ())]
        self._parameters = [p for p in parameters if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=spec.learning_rate, weight_decay=0.0, fused=True)
        self._targets: dict[int, Targets] = {}

    def values(self, row: PackedRow, scores: Scores) -> Tensor:
        """(M,) in float32, with gradient."""
        hidden = scores.hidden.detach() if self._trunk is None else self._trunk(row=row, head=False).hidden
        values: Tensor = self._head(hidden.float()).squeeze(-1)
        return values[row.term_row]

    @torch.no_grad()
    def score(
        self, policy: Any, rows: Sequence[Sequence[Sample]], device: torch.device
    ) -> dict[int, NDArray[np.float32]]:
        """Values of the action tokens of all samples, by their index in the step."""
        found: dict[int, NDArray[np.float32]] = {}
        for members in rows:
            row = pack(members).to(device)
            scores = policy(row=row, head=False)
            values, sequence = (t.float().cpu().numpy() for t in (self.values(row, scores), row.sequence))
            found |= {i: values[sequence == local] for local, i in enumerate(row.sample_index.tolist())}
        return found

    def credit(self, step: Step, groups: Sequence[Group], values: Mapping[int, NDArray[np.float32]]) -> Step:
        """The step with GAE's advantages in place of the objective's, normalised over all of its action tokens."""
        advantages: list[NDArray[np.float64]] = []
        self._targets = {}
        index = 0
        for trajectory in (t for group in groups for t in group.survivors):
            parts = [s for s in trajectory.sequences if s.action_mask.any()]
            of_episode = [values[index + i].astype(np.float64) for i in range(len(parts))]
            credits, returns = credit_episode(trajectory, of_episode, self.spec)
            for old, credit, target in zip(of_episode, credits, returns, strict=True):
                self._targets[index] = Targets(old.astype(np.float32), target.astype(np.float32))
                advantages.append(credit)
                index += 1
        flat = iter(np.split(normalise(np.concatenate(advantages)), np.cumsum([len(a) for a in advantages])[:-1]))
        samples = []
        for sample, of_tokens in zip(step.samples, flat, strict=True):
            spread = np.zeros(len(sample.token_ids))
            spread[sample.action_mask] = of_tokens
            samples.append(replace(sample, advantages=spread))
        return replace(step, samples=tuple(samples))

    def targets_of(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Old values and returns of the row's terms, (M,) each."""
        found = [self._targets[i] for i in row.sample_index.tolist()]
        device = row.targets.device
        return (
            torch.from_numpy(np.concatenate([t.values for t in found])).to(device),
            torch.from_numpy(np.concatenate([t.returns for t in found])).to(device),
        )

    def update(self, max_norm: float) -> float:
        """One optimizer step on what backward left, summed over ranks; the gradient's norm before its clip."""
        if torch.distributed.is_initialized():
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= torch.distributed.get_world_size()
        norm = float(nn.utils.clip_grad_norm_(self._parameters, max_norm))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def save(self, folder: Path) -> None:
        tensors = {f"parameter/{i}": p.detach() for i, p in enumerate(self._parameters)}
        for i, parameter in enumerate(self._parameters):
            tensors |= {f"{key}/{i}": value for key, value in self._optimizer.state.get(parameter, {}).items()}
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, folder / "critic.safetensors")

    def load(self, folder: Path) -> None:
        """
        Raises:
            TrainerError: the checkpoint has no critic, or another one's.
        """
        if not (folder / "critic.safetensors").is_file():
            raise TrainerError(f"checkpoint {folder} has no critic: it was written under another objective than ppo")
        tensors = load_file(folder / "critic.safetensors")
        theirs = {name: t.shape for name, t in tensors.items() if name.startswith("parameter/")}
        if theirs != {f"parameter/{i}": p.shape for i, p in enumerate(self._parameters)}:
            raise TrainerError(f"checkpoint {folder} has a critic of another kind: keep objective.kwargs.critic")
        self._optimizer.state.clear()
        for name, tensor in tensors.items():
            key, _, i = name.rpartition("/")
            parameter = self._parameters[int(i)]
            if key == "parameter":
                with torch.no_grad():
                    parameter.copy_(tensor)
            else:
                self._optimizer.state[parameter][key] = tensor if key == "step" else tensor.to(parameter.device)


def make_critic(
    spec: CriticSpec,
    policy: PreTrainedModel,
    model_path: str | Path,
    compute_dtype: torch.dtype,
    device: torch.device,
    *,
    mesh: DeviceMesh | None = None,
) -> Critic:
    """A critic on the policy's states, or on a second model, trained whole.

    Args:
        mesh: of the ranks that the policy is sharded over, if it is.

    Raises:
        ConfigError: the second model would have to be sharded too.
    """
    trunk: Any = None
    if spec.own_model:
        if mesh is not None:
            raise ConfigError("trainer.sharding=fsdp2 shards no second model: give the critic a layer on the policy")
        trunk = load_policy(model_path, compute_dtype)[0].to(device)  # type: ignore[arg-type]
        trunk.get_output_embeddings().requires_grad_(trunk.config.tie_word_embeddings)
    return Critic(spec, trunk, policy.config.get_text_config().hidden_size, device)


def credit_episode(
    trajectory: Trajectory, values: Sequence[NDArray[np.float64]], spec: CriticSpec
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Advantages and returns of an episode's action tokens, for each of its sequences that has any.

    A turn's reward comes with its last token. By turn, the value of a turn is that of its first token, and all of its
    tokens get the turn's advantage and return.

    Args:
        values: of the action tokens of those sequences, in order.
    """
    rewards = per_turn_rewards(trajectory)
    lengths = []  # action tokens of each turn; 0 where another policy spoke
    for sequence in trajectory.sequences:
        lengths += [int(sequence.action_mask[turn.start : turn.end].sum()) for turn in sequence.turns]
    spoken = np.flatnonzero(lengths)
    # What came between two turns of ours, a frozen policy's reward included, is earned by the turn before it.
    earned = np.zeros(len(spoken))
    for t, reward in enumerate(rewards):
        earned[max(0, int(np.searchsorted(spoken, t, side="right")) - 1)] += reward
    counts = np.array(lengths)[spoken]
    ends = np.cumsum(counts)
    flat = np.concatenate(values)
    if spec.level == "turn":
        by_turn = gae(earned, flat[ends - counts], discount=spec.discount, trace=spec.trace)
        advantages, returns = (np.repeat(a, counts) for a in by_turn)
    else:
        by_token = np.zeros(len(flat))
        by_token[ends - 1] = earned
        advantages, returns = gae(by_token, flat, discount=spec.discount, trace=spec.trace)
    cuts = np.cumsum([len(v) for v in values])[:-1]
    return np.split(advantages, cuts), np.split(returns, cuts)
