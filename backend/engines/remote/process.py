"""One server as a child process, in a Python of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.transport import Transport
from sparring.errors import EngineError

__all__ = ["ProcessOptions", "ServerProcess", "check_gpu_memory"]

_log = logging.getLogger(__name__)

_Options = TypeVar("_Options", bound="ProcessOptions")
_LOG_TAIL_BYTES = 3000
_GIB = 2**30

# What torchrun tells a rank of ours, besides TORCHELASTIC_*.
_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}


@dataclass(frozen=True)
class ProcessOptions:
    """How to start a server, of whatever kind.

    Attributes:
        python: the interpreter of the server's environment; it pins torch and transformers, so not ours.
        memory_fraction: share of the GPU's memory for weights and cache; the rest is the trainer's.
        max_running: requests decoded together.
        deterministic: a seeded request repeats whatever runs beside it, which costs speed.
        extra: further arguments of the server.
        start_timeout_s: imports, weights and graph capture take 1 to 3 minutes.
    """

    python: str = sys.executable
    host: str = "127.0.0.1"
    port: int = 0
    gpu: int = 0
    memory_fraction: float = 0.35
    max_running: int = 512
    dtype: str = "bfloat16"
    deterministic: bool = False
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 400.0


class ServerProcess(ABC, Generic[_Options]):
    """Starts, watches and ends the process. Its log is `log_path`; it dies with us, however we die.

    Attributes:
        key: the API key that the server asks for, if it asks for one.
    """

    kind: ClassVar[str]  # the server's name, for messages
    package: ClassVar[str]  # what its Python must have

    def __init__(
        self,
        model_path: Path,
        options: _Options,
        *,
        max_length: int,
        log_path: Path,
        command: Sequence[str] | None = None,
    ) -> None:
        """
        Args:
            max_length: context length in tokens.
            command: what to run instead of the server (the stand-in of tests); it gets the server's arguments.
        """
        self._model_path, self._max_length, self._log_path = model_path, max_length, log_path
        self._options, self._command = options, command
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self.key = self._make_key()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _make_key(self) -> str | None:
        return None

    @abstractmethod
    def _program(self) -> Sequence[str]:
        """What to run, arguments aside. It must end when its standard input closes."""

    @abstractmethod
    def _arguments(self, port: int) -> list[str]: ...

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """Variables that the server gets besides ours and the user's."""

    async def start(self) -> str:
        """Start and wait until it can generate; returns its URL.

        Raises:
            EngineError: too little GPU memory (said before anything loads), or the process died or hung, with the end
                of its log.
        """
        options = self._options
        if self._command is None:
            await asyncio.to_thread(check_gpu_memory, WeightLayout.of_model(self._model_path), options, self.kind)
        port = options.port or _free_port(options.host)
        command = [*(self._command or self._program()), *self._arguments(port)]
        self._stopped = False
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(  # noqa: ASYNC220  # returns as soon as the process exists
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_inherited() | self._environment() | dict(options.environment),
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(
                    f"cannot run {command[0]}: {error}; set engine.python to {self.kind}'s Python"
                ) from error
        url = f"http://{options.host}:{port}"
        try:
            await self._wait_ready(url)
        except BaseException:
            await self.stop()
            raise
        return url

    async def stop(self) -> None:
        """End the whole process group. Idempotent."""
        process = self._process
        if process is None or self._stopped:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nothing in it is worth a slow goodbye, and a hung one gives none
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            await asyncio.to_thread(process.wait, 10)
        except subprocess.TimeoutExpired:  # the system ends it some day; what failed before is what counts
            _log.warning("process %d was killed and has not ended after 10 s: does its GPU hang?", process.pid)
            return
        self._stopped = True  # from here on its number may be another's

    async def last_words(self, grace_s: float = 2.0) -> str | None:
        """How the process ended and what it logged last; None where it lives on after `grace_s` seconds."""
        if self._process is None:
            return None
        deadline = time.monotonic() + grace_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.05)
        return self._explain_exit()

    async def _wait_ready(self, url: str) -> None:
        assert self._process is not None
        transport = Transport(url)
        timeout_s = self._options.start_timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                if self._process.poll() is not None:
                    raise EngineError(f"the {self.kind} server did not start: {self._explain_exit()}")
                with contextlib.suppress(EngineError):
                    await transport.get("/health", deadline_s=5.0)
                    return
                if time.monotonic() > deadline:
                    raise EngineError(f"the {self.kind} server was not ready after {timeout_s:g} s: {self._log_tail()}")
                await asyncio.sleep(0.25)
        finally:
            await transport.close()

    def _explain_exit(self) -> str:
        assert self._process is not None
        code, tail = self._process.returncode, self._log_tail()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        advice = ""
        if "out of memory" in tail.lower():
            advice = "; out of GPU memory: lower engine.memory_fraction or engine.slots, or what else uses the GPU"
        elif f"No module named '{self.package}'" in tail:
            advice = f"; engine.python has no {self.package}: name the Python of {self.kind}'s environment"
        return f"the server's process ended ({how}){advice}. The end of {self._log_path}:\n{tail}"

    def _log_tail(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def _inherited() -> dict[str, str]:
    """Our environment, but for our place in a run of several ranks: the server would wait for those to join its own."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def check_gpu_memory(layout: WeightLayout, options: ProcessOptions, kind: str) -> None:
    """
    Raises:
        EngineError: the share of the GPU is not free, or cannot hold the weights and some cache.
    """
    wanted = ["--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    query = ["nvidia-smi", f"--id={options.gpu}", *wanted]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        total, free = (int(part) * 2**20 for part in answer.strip().splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise EngineError(f"no NVIDIA GPU {options.gpu} to be seen ({error}): {kind} needs one") from error
    weights = layout.parameters * (4 if options.dtype == "float32" else 2)
    share = options.memory_fraction * total
    if weights * 1.2 > share:
        raise EngineError(
            f"{layout.parameters / 1e9:.2f}B parameters in {options.dtype} take {weights / _GIB:.1f} GiB, and "
            f"engine.memory_fraction={options.memory_fraction:g} of {total / _GIB:.0f} GiB is {share / _GIB:.1f} GiB, "
            "too little with a cache beside them: raise it, or take a smaller model"
        )
    if share > free:
        raise EngineError(
            f"engine.memory_fraction={options.memory_fraction:g} is {share / _GIB:.1f} GiB, but GPU {options.gpu} has "
            f"{free / _GIB:.1f} of {total / _GIB:.0f} GiB free: lower it, or end what else uses the GPU"
        )


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
