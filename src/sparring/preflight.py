"""What can be refused in a second, before the minutes that a start may take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparring.backend.models import check_model
from sparring.config import EngineConfig, RunConfig, TrainerConfig
from sparring.errors import ConfigError
from sparring.extras import EXTRAS, missing
from sparring.plugins import check_file

__all__ = ["check_engine", "check_packages", "check_start"]

# Device nodes of NVIDIA's driver, of AMD's, of either under WSL, and of NVIDIA's boards: torch calls each of them cuda.
_GPU_NODES = ("nvidia[0-9]*", "kfd", "dxg", "nvhost-gpu")
_PYTHON_TIMEOUT_S = 30.0


def check_start(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a package is not installed; there is no such model, or no file of the objective; or as
            `check_engine`; or no GPU to train on, where one is asked for.
    """
    check_packages("a run")
    _check_choices(config.trainer)
    check_file(config.objective.name.rpartition(":")[0], "objective.name")
    check_model(config.model.path)
    check_engine(config.engine)
    _check_device("trainer.device", config.trainer.device)


def check_packages(what: str, *, remote: bool = False) -> None:
    """
    Args:
        what: needs them, in the error.
        remote: it samples from an endpoint, by HTTP alone.

    Raises:
        ConfigError: those that `what` needs besides the command line's own are not all there.
    """
    # matplotlib draws the last file of a run: no hour to find it missing.
    modules = (*EXTRAS["gateway"], *(() if remote else ("torch", "transformers", "accelerate", "trl", "matplotlib")))
    if lack := missing(modules, what, extra="gateway" if remote else "train"):
        raise ConfigError(lack)


def _check_choices(knobs: TrainerConfig) -> None:
    choices: Mapping[str, Sequence[str]] = {
        "trainer.lora": ["peft"] if knobs.lora is not None else [],
        f"trainer.optimizer={knobs.optimizer}": ["bitsandbytes"] if knobs.optimizer == "adamw_8bit" else [],
        f"trainer.report_to={knobs.report_to}": knobs.report_to,
    }
    for what, modules in choices.items():
        if lack := missing(modules, what):
            raise ConfigError(lack)


def check_engine(knobs: EngineConfig) -> None:
    """
    Raises:
        ConfigError: servers are to be started, and there is no GPU for them, or no Python that has them; or there is
            nothing to speak to servers with; or the embedded engine is to sample on a GPU that is not there.
    """
    if knobs.type == "torch":
        return _check_device("engine.device", knobs.device)
    if not knobs.urls:
        _check_servers(knobs)
    if lack := missing(["aiohttp"], f"engine.type={knobs.type}", extra=knobs.type):
        raise ConfigError(lack)


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
