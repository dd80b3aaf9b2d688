"""Batches without rollouts: groups of random tokens, a source that draws them, a publisher that keeps what it gets."""

import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sparring.backend.trainer.packing import Sample
from sparring.backend.trainer.policy import load_policy
from sparring.config import EngineConfig, EnvConfig, ModelConfig, RunConfig, TrainerConfig
from sparring.types import Group, StopReason, TokenSequence, Trajectory, Turn

torch.set_num_threads(1)


def make_sequence(
    rng: np.random.Generator, prompt: np.ndarray, *, version: int = 0, start: Sequence[int] = ()
) -> TokenSequence:
    """Two turns with a tool result between them; `start` are the first sampled tokens."""
    first = np.concatenate([np.array(start, np.int64), rng.integers(0, 250, rng.integers(2, 7))])
    tool, second = rng.integers(0, 250, 3), rng.integers(0, 250, rng.integers(1, 5))
    ids = np.concatenate([prompt, first, tool, second])
    a, b = len(prompt), len(prompt) + len(first)
    mask = np.zeros(len(ids), bool)
    mask[a:b] = mask[b + 3 :] = True
    logprobs = np.where(mask, rng.normal(-5.0, 0.5, len(ids)), 0.0)
    turns = (Turn(a, b, temperature=0.7), Turn(b + 3, len(ids), temperature=1.0))
    return TokenSequence(ids, mask, logprobs, np.where(mask, version, -1), turns)


def make_groups(rng: np.random.Generator, *, groups: int = 2, size: int = 4, version: int = 0) -> tuple[Group, ...]:
    system = rng.integers(0, 250, 9)
    out = []
    for g in range(groups):
        prompt = np.concatenate([system, rng.integers(0, 250, 5)])
        start = rng.integers(0, 250, 2)
        members = tuple(
            Trajectory(
                episode_id=f"v{version}-g{g}-e{i}",
                group_id=f"g{g}",
                env_id="test/Random-v0",
                task_id=f"train/{g}",
                seed=0,
                sequences=(make_sequence(rng, prompt, version=version, start=start if i % 2 else ()),),
                reward=float(rng.random()),
                stop_reason=StopReason.FINISHED,
            )
            for i in range(size)
        )
        out.append(Group(f"g{g}", members))
    return tuple(out)


@dataclass
class ListSource:
    """Batches drawn when they are asked for, from a generator seeded by the step: a synchronous run that repeats."""

    make: Callable[[int], tuple[Group, ...]]
    asked: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    rollout_buffer: Any = field(default_factory=queue.Queue)
    metrics_queue: Any = field(default_factory=queue.Queue)

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")

    def update_model_version(self, model_version: int) -> None:
        self.events.append(f"version {model_version}")

    def check_health(self, stale_after_s: float) -> None: ...

    def next_batch(self, version: int, timeout_s: float) -> Any:
        self.asked.append(version)
        return SimpleNamespace(groups=self.make(version), stats={"reward": 0.5})


@dataclass
class KeepingPublisher:
    next_version: int = 0
    published: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.published[self.next_version] = {name: tensor.clone() for name, tensor in iterator}


def make_config(**trainer: Any) -> RunConfig:
    defaults = {"steps": 3, "learning_rate": 1e-3, "dtype": "float32", "checkpoint_every": 0, "token_budget": 60}
    return RunConfig(
        model=ModelConfig(path="tiny-qwen3"),
        env=EnvConfig(id="test/Random-v0"),
        engine=EngineConfig(dtype="float32"),
        trainer=TrainerConfig(**(defaults | trainer)),
    )


def make_samples(seed: int = 0, **kwargs: Any) -> list[Sample]:
    from sparring.backend.trainer.step import make_sample

    rng = np.random.default_rng(seed)
    sequences = [s for g in make_groups(rng, **kwargs) for t in g.trajectories for s in t.sequences]
    return [make_sample(s, rng.normal(size=len(s.turns)), version=1, index=i) for i, s in enumerate(sequences)]


@pytest.fixture
def kit() -> SimpleNamespace:
    """The helpers above, for tests, which cannot import this file."""
    return SimpleNamespace(
        make_sequence=make_sequence,
        make_groups=make_groups,
        make_samples=make_samples,
        make_config=make_config,
        ListSource=ListSource,
        KeepingPublisher=KeepingPublisher,
        source=lambda seed=0: ListSource(lambda v: make_groups(np.random.default_rng([seed, v]), version=v)),
    )


@pytest.fixture
def policy(tiny_qwen3: Path) -> Any:
    """The tiny model in float64, where rounding cannot hide an error. transformers' norms would round to float32."""
    model, _ = load_policy(tiny_qwen3, torch.float64)
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = functools.partial(_norm, module)
    return model.double()


def _norm(module: Qwen3RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
