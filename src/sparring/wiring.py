"""What a run and an evaluation make alike out of a configuration: policy, engine, sampling, threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.agents.native import NativePolicy
from sparring.agents.policy import Policy
from sparring.backend.onednn import BOUNDED_KERNEL_CACHES
from sparring.config import LoraConfig, RunConfig
from sparring.plugins import call_factory, load_attribute

if TYPE_CHECKING:
    from sparring.backend.engines.base import Engine, SamplingParams

__all__ = ["make_engine", "make_policy", "sampling_params", "set_torch_environment"]


def make_policy(config: RunConfig) -> Policy:
    """
    Raises:
        ConfigError: there is no such policy, or it cannot play.
    """
    if config.agent.policy == "native":
        return NativePolicy()
    make = load_attribute(config.agent.policy, "agent.policy")
    policy: Policy = call_factory(make, config.agent.kwargs, f"agent.kwargs of {config.agent.policy!r}")
    if callable(check := getattr(policy, "check_start", None)):
        check()
    return policy


def make_engine(config: RunConfig, model: Path, logs: Path, *, lora: LoraConfig | None = None) -> Engine:
    """The engine of the model in the folder `model`, not started.

    Args:
        logs: a folder for those of its servers.
        lora: it gets the tensors of such an adapter as its new weights.
    """
    knobs = config.engine
    if knobs.type != "torch":
        from sparring.backend.engines.configured import make_remote

        return make_remote(config, model, logs, lora=lora)
    make: Any
    if knobs.in_process:
        from sparring.backend.engines.torch_engine import TorchEngine as make
    else:
        from sparring.backend.engines.process_engine import ProcessEngine as make
    return make(
        model,
        slots=knobs.slots,
        max_length=config.model.max_length,
        dtype=knobs.dtype,
        device=knobs.device,
        threads=knobs.threads,
        deterministic=knobs.deterministic,
        seed=config.seed,
        lora=lora,
    )


def sampling_params(config: RunConfig) -> SamplingParams:
    from sparring.backend.engines.base import SamplingParams

    return SamplingParams(**config.sampling.model_dump())


def set_torch_environment(config: RunConfig) -> None:
    """Before torch is imported: its threads, those of two processes, must not spin on each other's cores."""
    defaults = {
        "OMP_NUM_THREADS": str(config.trainer.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **BOUNDED_KERNEL_CACHES,
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
