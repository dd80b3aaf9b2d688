"""The embedded engine in a process of its own, beside the trainer: weights cross through shared memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from sparring.backend.engines.base import WeightSource
from sparring.backend.engines.client import WorkerClient
from sparring.backend.engines.options import EngineOptions
from sparring.backend.engines.shared_weights import SharedWeights, open_shared_file
from sparring.backend.onednn import BOUNDED_KERNEL_CACHES
from sparring.errors import EngineError

__all__ = ["ProcessEngine"]

_T = TypeVar("_T")

_LONGEST_LINE = 1 << 28  # bytes; a status or a completion is far below
_EXIT_DEADLINE_S = 10.0
_STATUS_DEADLINE_S = 4.0  # it answers at once, unless the machine has no time for it
# For glibc: keep some freed megabytes instead of giving them back, in one heap for all threads. Else every large
# intermediate of every step is mapped, zeroed and unmapped anew, most of all in attention over a next turn's tokens.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 26),
    "MALLOC_ARENA_MAX": "1",
}


class _Staged:
    """The weights that lie in the shared memory, as a source: once, and until others are staged."""

    def __init__(self, shared: SharedWeights) -> None:
        self._shared = shared

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._shared.read()


class ProcessEngine(WorkerClient):
    """`TorchEngine` without the interpreter's lock in common with the trainer; takes the same arguments.

    The process ends with this one, however this one ends. When it dies, what is pending fails at once with an
    `EngineError` that names its exit code and its last words.
    """

    def __init__(self, model: str | Path, *, niceness: int = 0, start_timeout_s: float = 300.0, **options: Any) -> None:
        """
        Args:
            model: a folder.
            niceness: added to the child's, so that it yields to the trainer.
            start_timeout_s: most seconds from `start` to a loaded model.
            options: those of `EngineOptions`, by name; the threads are the child's alone.
        """
        super().__init__()
        self.options = EngineOptions(**options)
        self._model, self._niceness, self._start_timeout_s = str(model), niceness, start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._staged: _Staged | None = None

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        weights_fd = open_shared_file()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _end
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.options.threads),
            "MKL_NUM_THREADS": str(self.options.threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads of two torch processes stall each other for minutes
            "TOKENIZERS_PARALLELISM": "false",
            **_KEEP_MEMORY,
            **BOUNDED_KERNEL_CACHES,
        }
        with theirs:
            # -P: the working directory, often a repository's root, must not shadow installed packages
            self._process = subprocess.Popen(  # noqa: ASYNC220  # a few milliseconds, once
                [sys.executable, "-P", "-m", "sparring.backend.engines.process_worker",
                 str(theirs.fileno()), str(weights_fd), str(os.getpid())],
                pass_fds=(theirs.fileno(), weights_fd), env=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr,
            )  # fmt: skip
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
            self._send({"model": self._model, "options": self.options.to_json(), "niceness": self._niceness})
            async with asyncio.timeout(self._start_timeout_s):
                line = await reader.readline()
            if not line:
                raise EngineError(await self._obituary())
            (hello,) = json.loads(line)
            if hello["event"] != "ready":
                raise EngineError(hello["reason"])
        except TimeoutError:
            await self._end()
            raise EngineError(
                f"the engine's process was not ready within {self._start_timeout_s:.0f} s: the machine is busy or the "
                "model is large; raise start_timeout_s"
            ) from None
        except BaseException:
            await self._end()
            raise
        finally:
            if self._process is None:
                os.close(weights_fd)
        shapes = {name: tuple(shape) for name, shape in hello["shapes"].items()}
        self._shared = SharedWeights(weights_fd, shapes, hello["tied"], getattr(torch, hello["dtype"]))
        os.close(weights_fd)  # the mapping stays
        self._failure, self.version = None, 0
        self._listener = asyncio.create_task(self._listen(reader))

    async def stop(self) -> None:
        if self._process is None:
            return
        if self._failure is None:
            try:
                await self._call({"op": "stop"}, deadline_s=_EXIT_DEADLINE_S)
            except EngineError:
                pass  # it died first, or hangs and is killed below
        self._die("the engine was stopped")
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await self._end()

    async def stage_weights(self, version: int, source: WeightSource) -> WeightSource:
        """Copy tensors into the shared memory; the child goes on sampling from its own."""
        self._check()
        if isinstance(source, str | Path):
            return source
        return await self._to_the_end(self._stage(source))

    async def update_weights(self, version: int, source: WeightSource) -> None:
        self._check()
        await self._to_the_end(self._exchange(version, source))

    async def _to_the_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        """A caller that gives up must not leave the buffer half written, or half read, for the next one."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _stage(self, source: Iterable[tuple[str, torch.Tensor]]) -> _Staged:
        async with self._updating:
            self._staged = None
            await asyncio.to_thread(self._shared.write, source)
            self._staged = _Staged(self._shared)
            return self._staged

    async def _exchange(self, version: int, source: WeightSource) -> None:
        if not isinstance(source, str | Path | _Staged):
            source = await self._stage(source)
        async with self._updating:
            if isinstance(source, _Staged) and source is not self._staged:
                raise EngineError(
                    f"the weights staged for version {version} were overwritten by later ones: stage them again"
                )
            folder = str(source) if isinstance(source, str | Path) else None
            await self._call({"op": "update", "version": version, "source": folder})
            self.version, self._staged = version, None

    def _send(self, command: dict[str, Any]) -> None:
        if not self._writer.is_closing():  # else the child is gone, and `_listen` says how
            self._writer.write(json.dumps(command).encode() + b"\n")

    def _die(self, reason: str) -> None:
        super()._die(reason)
        if self._process is not None:
            self._process.kill()  # where it hangs, nothing may come of it later

    async def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._call({"op": "status"}, deadline_s=_STATUS_DEADLINE_S)
        return status

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._receive(json.loads(line))
        except OSError:
            pass  # a connection that broke says the same as one that closed
        self._die(await self._obituary())

    async def _obituary(self) -> str:
        """How the child ended, once its socket has closed."""
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, _EXIT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return "the engine's process closed its connection and hangs: it is killed"
        how = f"exit code {code}" if code >= 0 else f"exit code {code}, {signal.Signals(-code).name}"
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 2000))
        words = self._stderr.read().decode(errors="replace").strip()
        return f"the engine's process died with {how}{': ' + words if words else ''}"

    async def _end(self) -> None:
        """Make sure that the child is gone and that nothing of it stays open."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
        if hasattr(self, "_writer"):
            self._writer.close()
        self._stderr.close()
