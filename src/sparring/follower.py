"""A run on several devices, as `torchrun` starts it: the main rank samples, writes and reports (`run.py`), the others
train along."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sparring.config import RunConfig
from sparring.config_file import LoadedConfig
from sparring.interrupt import interruptible
from sparring.run_dir import RunDirectory
from sparring.wiring import set_torch_environment

__all__ = ["follow", "is_alone", "is_follower", "share_start"]

_Start = tuple[Path, Path | None, RunConfig]
_PATIENCE = timedelta(hours=2)  # of the others, while the main rank prepares, waits for a batch or evaluates


def is_follower() -> bool:
    """By the variables that torchrun sets; a cluster's scheduler may set one of them alone."""
    return not is_alone() and int(os.environ.get("RANK", "0")) > 0


def is_alone() -> bool:
    """Whether the run is one process."""
    return int(os.environ.get("WORLD_SIZE", "1")) <= 1


def share_start(device: str, start: _Start | None) -> _Start | None:
    """What the main rank trains, its model's folder and an adapter's, and how, on every rank. The others wait for it
    here.

    Args:
        device: `trainer.device`.
        start: the main rank's; None elsewhere.
    """
    if is_alone():
        return start
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    from sparring.backend.compute_type import computes_on_cpu

    PartialState(cpu=computes_on_cpu(device), timeout=_PATIENCE)
    payload = [start]
    broadcast_object_list(payload, from_process=0)
    return payload[0]


def follow(loaded: LoadedConfig, *, resume: bool = False) -> int:
    """Train along until the main rank's run ends. Returns the exit status.

    Raises:
        SparringError: what ended the run, or that another rank is gone.
    """
    directory = RunDirectory(loaded.run_dir)
    if directory.finished_steps >= loaded.config.trainer.steps:
        return 0
    set_torch_environment(loaded.config)
    start = share_start(loaded.config.trainer.device, None)
    assert start is not None
    from sparring.backend.trainer.trainer import AgentTrainer

    model, adapter, config = start
    nobody: Any = SimpleNamespace(next_version=0)  # the main rank alone takes batches and publishes weights
    with interruptible():
        try:
            trainer = AgentTrainer(model, config, nobody, nobody, run_dir=directory.root, adapter=adapter)
            trainer.train(resume=resume)
            trainer.write_model(directory.model, chat_template="")
        except KeyboardInterrupt:
            return 130
    return 0
