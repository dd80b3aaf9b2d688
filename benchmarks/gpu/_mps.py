"""NVIDIA's Multi-Process Service: kernels of several processes run on one GPU side by side instead of in time slices.

    python -m benchmarks.gpu._mps start      # processes started with CUDA_MPS_PIPE_DIRECTORY=/tmp/sparring-mps use it
    python -m benchmarks.gpu._mps stop

It is a daemon of the user's and no setting of the GPU's: processes without that variable share in time slices as ever.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["DRIVER", "PIPES", "running", "start", "stop"]

PIPES = "/tmp/sparring-mps"
DRIVER = Path("/usr/local/nvidia")
_CONTROL = "nvidia-cuda-mps-control"


def start() -> None:
    """
    Raises:
        RuntimeError: no such program, or it does not start.
    """
    if running():
        return
    program = _program()
    if program is None:
        raise RuntimeError(f"{_CONTROL} is not installed: it comes with NVIDIA's driver")
    Path(PIPES).mkdir(exist_ok=True)
    done = subprocess.run([program, "-d"], env=_environment(), capture_output=True, text=True, timeout=20)
    if done.returncode or not running():
        raise RuntimeError(f"MPS did not start: {done.stdout}{done.stderr}")


def stop() -> None:
    program = _program()
    if program is not None and running():
        subprocess.run([program], input="quit\n", env=_environment(), text=True, timeout=60, check=False)


def running() -> bool:
    """Whether the daemon answers."""
    program = _program()
    if program is None or not (Path(PIPES) / "control").exists():
        return False
    asked = subprocess.run(
        [program], input="get_server_list\n", env=_environment(), capture_output=True, text=True, timeout=20
    )
    return asked.returncode == 0


def _program() -> str | None:
    return shutil.which(_CONTROL) or next(map(str, DRIVER.rglob(_CONTROL)), None)


def _environment() -> dict[str, str]:
    """The daemon finds its server beside itself, wherever the driver lies."""
    path = os.pathsep.join([str(Path(_program() or "").parent), os.environ.get("PATH", "")])
    return os.environ | {"CUDA_MPS_PIPE_DIRECTORY": PIPES, "CUDA_MPS_LOG_DIRECTORY": PIPES, "PATH": path}


if __name__ == "__main__":
    {"start": start, "stop": stop}[sys.argv[1]]()
