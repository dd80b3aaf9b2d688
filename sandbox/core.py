"""What an environment sees of a sandbox, whatever is behind it."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from sparring.errors import SandboxError
from sparring.sandbox.archive import pack_tree, unpack_tree
from sparring.sandbox.command import DEADLINE_GRACE_S, ExecResult, answered_by, run_to_end
from sparring.sandbox.output import BoundedOutput
from sparring.sandbox.process import OnOutput, Process
from sparring.sandbox.request import SandboxRequestError, resolve_path
from sparring.sandbox.spec import SandboxSpec
from sparring.sandbox.transfer import (
    Snapshot,
    empty_folder,
    pack_folder,
    read_file,
    transfer_limit,
    unpack_into,
    write_file,
)

if TYPE_CHECKING:
    from sparring.sandbox.session import ShellSession

__all__ = ["Sandbox"]


class Sandbox(ABC):
    """A place where untrusted code runs. Started once, used by one episode, stopped; `async with` does both ends.

    Every method has a deadline. Infrastructure that fails raises `SandboxError`; a command that fails, hangs or is
    killed is a result. Processes that a command leaves behind may be ended with it: what shall live on is started
    in a `session`.
    """

    kind: ClassVar[str]

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.id = uuid.uuid4().hex[:12]
        self._sessions: list[ShellSession] = []
        self._started = False
        self._oom_kills_seen = 0
        self.on_gone: Callable[[Sandbox], object] = lambda _: None

    async def __aenter__(self) -> Self:
        """Start, unless it was taken from a provider and runs already."""
        if not self._started:
            await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, *, timeout_s: float = 120.0) -> None:
        """Start, once; on failure, and on cancellation, nothing is left.

        Raises:
            SandboxError: it did not start, with what to do; or it was started before.
        """
        if self._started:
            raise SandboxError(f"{self} was started before; each is used once, make another")
        self._started = True
        try:
            await self._start(timeout_s)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every process and remove everything. Idempotent; never raises for a sandbox that is already gone."""
        if await self._stop():
            self.on_gone(self)

    # What a backend provides

    @property
    def workdir(self) -> str:
        """The work folder, as commands inside see it."""
        return self.spec.workdir

    @property
    def scratch(self) -> str:
        """A folder beside the work folder for what is not work; snapshots leave it out."""
        return "/tmp"

    @abstractmethod
    async def _start(self, timeout_s: float) -> None:
        """As `start`. `_stop` cleans up after a failure."""

    @abstractmethod
    async def _stop(self) -> bool:
        """As `stop`; may be called at any time, any number of times. False: something is left, to be tried again."""

    @abstractmethod
    async def alive(self) -> bool:
        """Whether commands can run; cheap."""

    @abstractmethod
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
    ) -> Process:
        """Start a command whose input and output the caller handles; `timeout_s` ends it from inside, if it can.

        Raises:
            SandboxError: the sandbox is not running, or broke.
        """

    async def clear(self) -> None:  # noqa: B027  # without a process limit there is no need
        """End all that commands and sessions run: at the process limit nothing else would start."""

    async def oom_kills(self) -> int:
        """Processes killed for memory so far, where the backend can tell; else 0."""
        return 0

    # What is made of it

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        timeout_s: float = 30.0,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command to its end: an argv, or a string for /bin/sh inside the sandbox.

        `cwd` is relative to the work folder. The call returns within `timeout_s` + 2 s, whatever the command does.

        Raises:
            SandboxRequestError: a NUL byte, a bad name in `env`.
            SandboxError: the sandbox broke, or did not start the command in time.
        """
        stdout, stderr = BoundedOutput(self.spec.max_output_bytes), BoundedOutput(self.spec.max_output_bytes)
        until = asyncio.get_running_loop().time() + timeout_s + DEADLINE_GRACE_S
        ended = await run_to_end(
            self,
            ["/bin/sh", "-c", command] if isinstance(command, str) else command,
            lambda stream, data: (stdout if stream == 1 else stderr).feed(data),
            timeout_s=timeout_s,
            stdin=stdin,
            env=env,
            cwd=cwd,
            user=user,
        )
        async with answered_by(until, self):
            oom_killed = not ended.timed_out and await self.post_mortem(ended.exit_code)
        return ExecResult(
            ended.exit_code,
            stdout.text(),
            stderr.text(),
            ended.duration_s,
            truncated=stdout.truncated or stderr.truncated,
            timed_out=ended.timed_out,
            oom_killed=oom_killed,
        )

    async def read(self, path: str, *, max_bytes: int | None = None, timeout_s: float = 30.0) -> bytes:
        """The bytes of a file, `max_bytes` at most, or as many as may be moved at all.

        Raises:
            SandboxRequestError: outside `workdir` and `scratch`, missing, not a file, or too large.
        """
        return await read_file(self, self.resolve(path), max_bytes=max_bytes, timeout_s=timeout_s)

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644, timeout_s: float = 30.0) -> None:
        """Write a file, making its folders.

        Raises:
            SandboxRequestError: outside `workdir` and `scratch`, not a file, not writable, disk full, or too large.
        """
        body = data.encode() if isinstance(data, str) else data
        await write_file(self, self.resolve(path), body, mode=mode, timeout_s=timeout_s)

    async def upload(self, local: Path, path: str = ".", *, timeout_s: float = 120.0) -> None:
        """Copy a file to `path`, or the contents of a folder into the folder `path`. Links are copied as links.

        Raises:
            SandboxRequestError: as `write`; or a link in the tree that leads out of it.
        """
        if await asyncio.to_thread(local.is_dir):
            packed = await asyncio.to_thread(pack_tree, local, transfer_limit(self.spec))
            await unpack_into(self, packed, self.resolve(path), timeout_s=timeout_s)
        else:
            data, status = await asyncio.to_thread(lambda: (local.read_bytes(), local.stat()))
            await self.write(path, data, mode=status.st_mode & 0o777, timeout_s=timeout_s)

    async def download(self, path: str, local: Path, *, timeout_s: float = 120.0) -> None:
        """Copy a file to `local`, or a folder to a new or empty folder `local`.

        The archive that comes out is hostile: see `archive.unpack_tree` for what is refused.

        Raises:
            SandboxRequestError: missing, too large, or an archive that would write outside `local`.
        """
        if (await self.exec(["test", "-d", self.resolve(path)], timeout_s=timeout_s)).exit_code != 0:
            data = await self.read(path, timeout_s=timeout_s)
            await asyncio.to_thread(local.write_bytes, data)
            return
        packed = await pack_folder(self, self.resolve(path), timeout_s=timeout_s)
        await asyncio.to_thread(unpack_tree, packed, local, transfer_limit(self.spec))

    async def session(self, *, timeout_s: float = 30.0) -> ShellSession:
        """A persistent shell: `cd`, exports and background jobs live from call to call."""
        from sparring.sandbox.session import ShellSession

        session = ShellSession(self)
        await session.start(timeout_s=timeout_s)
        self._sessions.append(session)
        return session

    async def snapshot(self, *, timeout_s: float = 120.0) -> Snapshot:
        """The image and the work folder's files."""
        return Snapshot(self.spec.image, await pack_folder(self, self.workdir, timeout_s=timeout_s))

    async def restore(self, snapshot: Snapshot, *, timeout_s: float = 120.0) -> None:
        """Make the work folder what it was at `snapshot`, of this or of another sandbox with the same image.

        Sessions are closed: their processes would go on writing.
        """
        if snapshot.image != self.spec.image:
            raise SandboxRequestError(f"a snapshot of image {snapshot.image!r} does not fit one of {self.spec.image!r}")
        await self.close_sessions()
        await empty_folder(self, self.workdir, timeout_s=timeout_s)
        await unpack_into(self, snapshot.work_tar, self.workdir, timeout_s=timeout_s)

    async def close_sessions(self) -> None:
        for session in self._sessions:
            await session.close()
        self._sessions.clear()

    def resolve(self, path: str) -> str:
        """The absolute path that `path` names: relative to the work folder, which it may not leave but for `scratch`.

        Raises:
            SandboxRequestError: a NUL byte, or it leaves.
        """
        return resolve_path(path, workdir=self.workdir, scratch=self.scratch)

    async def post_mortem(self, exit_code: int) -> bool:
        """Whether a command that failed, not by its time limit, did so because a process was killed for memory.

        Raises:
            SandboxError: it was the sandbox that ended under the command.
        """
        if exit_code == 0:
            return False
        seen, self._oom_kills_seen = self._oom_kills_seen, await self.oom_kills()
        if self._oom_kills_seen > seen:
            return True
        if exit_code == 137 and not await self.alive():
            raise SandboxError(f"{self} ended while a command ran; was it removed, or its daemon restarted?")
        return False

    def __str__(self) -> str:
        return f"{self.kind} sandbox {self.id}"
