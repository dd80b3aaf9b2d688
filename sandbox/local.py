"""Commands on this machine, in a temporary folder: for code that you trust."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from sparring.errors import SandboxError
from sparring.sandbox.command import in_folder
from sparring.sandbox.core import Sandbox
from sparring.sandbox.process import HostProcess, OnOutput
from sparring.sandbox.provider import SandboxProvider
from sparring.sandbox.spec import SandboxSpec

__all__ = ["LocalProvider", "LocalSandbox"]


class LocalSandbox(Sandbox):
    """ISOLATES NOTHING: commands run as you, on your files, with your network. Trusted code and tests only.

    The spec's limits do not hold; output and time are bounded all the same.
    """

    kind: ClassVar[str] = "local"

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._folder: Path | None = None
        self._processes: set[HostProcess] = set()

    @property
    def workdir(self) -> str:
        return str(self._folder / "work") if self._folder else self.spec.workdir

    @property
    def scratch(self) -> str:
        return str(self._folder / "scratch") if self._folder else "/tmp"

    async def _start(self, timeout_s: float) -> None:
        warnings.warn("LocalSandbox isolates nothing: code runs as you, on this machine", stacklevel=3)
        self._folder = await asyncio.to_thread(_fresh_folder)

    async def _stop(self) -> bool:
        for process in list(self._processes):
            process.kill()
        if self._processes:
            await asyncio.wait([process.finished for process in self._processes], timeout=5.0)
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return True

    async def alive(self) -> bool:
        return self._folder is not None and self._folder.is_dir()

    async def spawn(
        self,
        argv: Sequence[str],
        on_output: OnOutput,
        *,
        stdin: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> HostProcess:
        if self._folder is None:
            raise SandboxError(f"{self} is not running; start it first")
        if user is not None:
            raise SandboxError("a local sandbox runs commands as you; it has no other users")
        path = os.environ.get("PATH", os.defpath)
        base = {"PATH": path, "HOME": self.scratch, "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat"}
        process = HostProcess(on_output)
        await process.start(
            in_folder(cwd or ".", argv),  # by a shell: a missing program is a command that fails
            env=base | dict(self.spec.env) | dict(env or {}),
            cwd=self.workdir,
            stdin=stdin,
        )
        if timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(timeout_s, process.kill)
            process.finished.add_done_callback(lambda _: timer.cancel())
        self._processes.add(process)
        process.on_finished(self._processes.discard)
        return process


class LocalProvider(SandboxProvider):
    """Makes `LocalSandbox`es; only ever chosen by name."""

    kind: ClassVar[str] = "local"

    async def open(self) -> None:
        pass

    def _make(self, spec: SandboxSpec) -> LocalSandbox:
        return LocalSandbox(spec)


def _fresh_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sparring-local-")).resolve()
    (folder / "work").mkdir()
    (folder / "scratch").mkdir()
    return folder
