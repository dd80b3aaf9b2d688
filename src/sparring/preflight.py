"""What can be refused in a second, before the minutes that a start may take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from sparring.backend.models import check_model
from sparring.config import EngineConfig, RunConfig
from sparring.errors import ConfigError

__all__ = ["check_engine", "check_start"]

# Device nodes of NVIDIA's driver, of AMD's, of either under WSL, and of NVIDIA's boards: torch calls each of them cuda.
_GPU_NODES = ("nvidia[0-9]*", "kfd", "dxg", "nvhost-gpu")
_PYTHON_TIMEOUT_S = 30.0


def check_start(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: there is no such model; or as `check_engine`; or no GPU to train on, where one is asked for.
    """
    check_model(config.model.path)
    check_engine(config.engine)
    _check_device("trainer.device", config.trainer.device)


def check_engine(knobs: EngineConfig) -> None:
    """
    Raises:
        ConfigError: servers are to be started, and there is no GPU for them, or no Python that has them; or the
            embedded engine is to sample on a GPU that is not there.
    """
    if knobs.type == "torch":
        _check_device("engine.device", knobs.device)
    elif not knobs.urls:
        _check_servers(knobs)


def _check_servers(knobs: EngineConfig) -> None:
    if not _sees_gpu():
        raise ConfigError(
            f"engine.type={knobs.type} starts servers on a GPU, and this machine shows none: take engine.type=torch, "
            "or name servers that run elsewhere in engine.urls"
        )
    python = shutil.which(knobs.python or sys.executable)
    if python is None:
        raise ConfigError(f"engine.python={knobs.python!r} is no program that can be run: name a Python")
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({knobs.type!r}) is None)"
    environment = {**os.environ, **knobs.environment}
    try:
        found = subprocess.run(
            [python, "-P", "-c", find], env=environment, capture_output=True, timeout=_PYTHON_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python={knobs.python!r} does not run: {error}") from error
    if found.returncode != 0:
        raise ConfigError(
            f"{python} has no {knobs.type}: set engine.python to the Python of the environment that {knobs.type} is in"
        )


def _check_device(key: str, device: str) -> None:
    if device.startswith("cuda") and not _sees_gpu():
        raise ConfigError(f"{key}={device}, and this machine shows no GPU: take auto, or cpu")


def _sees_gpu() -> bool:
    return any(any(Path("/dev").glob(pattern)) for pattern in _GPU_NODES)
