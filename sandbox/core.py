"""What an environment sees of a sandbox, whatever is behind it."""

from __future__ import annotations

import asyncio
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sparring.errors import ConfigError, SandboxError
from sparring.sandbox.archive import pack_tree, unpack_tree
from sparring.sandbox.output import BoundedOutput
from sparring.sandbox.process import CommandNotStarted, OnOutput, Process

if TYPE_CHECKING:
    from sparring.sandbox.session import ShellSession

__all__ = ["ExecResult", "Sandbox", "SandboxRequestError", "SandboxSpec", "Snapshot"]

MIB = 1 << 20
# A command's own clock ends it at `timeout_s`; the host steps in after KILL_GRACE_S more, and gives the caller its
# result no later than DEADLINE_GRACE_S after `timeout_s`, whatever the command or the daemon does.
KILL_GRACE_S = 1.0
DEADLINE_GRACE_S = 1.8
_PROBE_S = 5.0
_RETRIES = 2  # of a command that was never run
_NO_FORK = b"timeout: fork system call failed"  # of the program that holds a command to its time
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class SandboxRequestError(SandboxError):
    """The call is at fault, not the sandbox: a path outside the work folder, a missing file, a NUL byte, too much data.

    Tools answer the model with its message; an environment's own call that raises it has a bug.
    """


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is made of and how much it may use. Two equal specs are interchangeable.

    Attributes:
        image: what the backend starts from; "" is its default (Docker: sparring/python; bubblewrap: see
            `BubblewrapSandbox`).
        workdir: absolute path of the work folder, empty at the start, where commands start and relative paths begin.
        memory_mib: memory of all processes together. The files below `disk_mib` come on top of it.
        cpus: processors, as a share of time.
        pids: processes and threads together.
        disk_mib: size of the work folder, held in memory (a tmpfs), so that a full disk is the sandbox's own; /tmp is
            `tmp_mib` beside it, and everything else is read-only.
        env: environment variables of every command.
        network: "host:port" pairs that may be reached, through a proxy; empty: no network at all.
        lifetime_s: past this age whoever finds the sandbox may remove it.
        max_output_bytes: of standard output and of standard error of one command, the most that is kept.
        max_transfer_mib: the most that `read`, `write`, `upload`, `download` and `snapshot` move.

    Raises:
        ConfigError: a value is out of range.
    """

    image: str = ""
    workdir: str = "/work"
    memory_mib: int = 1024
    cpus: float = 1.0
    pids: int = 256
    disk_mib: int = 512
    env: Mapping[str, str] = field(default_factory=dict)
    network: tuple[str, ...] = ()
    lifetime_s: float = 6 * 3600.0
    max_output_bytes: int = MIB
    max_transfer_mib: int = 256

    def __post_init__(self) -> None:
        for name in ("memory_mib", "cpus", "pids", "disk_mib", "lifetime_s", "max_output_bytes", "max_transfer_mib"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"SandboxSpec.{name} must be above 0, not {getattr(self, name)}")
        path = PurePosixPath(self.workdir)
        system = {"proc", "dev", "sys"}
        if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or path.parts[1] in system:
            raise ConfigError(f"SandboxSpec.workdir must be an absolute folder such as /work, not {self.workdir!r}")
        for authority in self.network:
            if not re.fullmatch(r"[A-Za-z0-9.\-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", authority):
                raise ConfigError(f"SandboxSpec.network takes 'host:port' entries, not {authority!r}")
        check_env(self.env, ConfigError)

    @property
    def tmp_mib(self) -> int:
        """Size of /tmp."""
        return max(16, self.disk_mib // 4)

    @property
    def total_memory_mib(self) -> int:
        """Memory of the processes and of the files, which count as the sandbox's memory."""
        return self.memory_mib + self.disk_mib + self.tmp_mib

    def __hash__(self) -> int:
        return hash((self.image, self.workdir, self.memory_mib, self.network, tuple(sorted(self.env.items()))))


@dataclass(frozen=True)
class ExecResult:
    """What a command gave.

    Attributes:
        exit_code: 128 + signal where a signal ended it.
        stdout, stderr: text; undecodable bytes become U+FFFD, and output beyond the bound is left out in the middle.
        truncated: some output was left out.
        timed_out: it was killed because its time was over.
        oom_killed: a process of the sandbox was killed for memory while it ran.
    """

    exit_code: int
    stdout: str
    stderr: str
    duration_s: float
    truncated: bool = False
    timed_out: bool = False
    oom_killed: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True)
class Snapshot:
    """A sandbox's image and the files of its work folder, as a tar archive. No processes."""

    image: str
    work_tar: bytes = field(repr=False)


def check_env(env: Mapping[str, str], error: type[SandboxError] | type[ConfigError] = SandboxRequestError) -> None:
    for name, value in env.items():
        if not _NAME.match(name) or "\0" in value or not _encodable(value):
            raise error(f"environment variable {name!r} has a bad name, or a NUL byte or lone surrogate in its value")


def in_folder(cwd: str | None, argv: Sequence[str]) -> Sequence[str]:
    """`argv` run in `cwd`, relative to the work folder; one that is not there fails the command, not the sandbox."""
    return ["sh", "-c", 'cd -- "$1" && shift && exec "$@"', "sh", cwd, *argv] if cwd else argv


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
        exit_code, duration_s, timed_out = await self._run(
            ["/bin/sh", "-c", command] if isinstance(command, str) else command,
            lambda stream, data: (stdout if stream == 1 else stderr).feed(data),
            timeout_s=timeout_s,
            stdin=stdin,
            env=env,
            cwd=cwd,
            user=user,
        )
        return ExecResult(
            exit_code,
            stdout.text(),
            stderr.text(),
            duration_s,
            truncated=stdout.truncated or stderr.truncated,
            timed_out=timed_out,
            oom_killed=not timed_out and await self.post_mortem(exit_code),
        )

    async def read(self, path: str, *, max_bytes: int | None = None, timeout_s: float = 30.0) -> bytes:
        """The bytes of a file, `max_bytes` at most, or as many as may be moved at all.

        Raises:
            SandboxRequestError: outside `workdir` and `scratch`, missing, not a file, or too large.
        """
        limit = min(max_bytes or self._transfer_limit, self._transfer_limit)
        # `head` bounds what a device or an endless pipe can send.
        script = '[ -f "$1" ] || { echo "no such file" >&2; exit 1; }; head -c "$2" -- "$1"'
        data = await self._transfer(script, self.resolve(path), str(limit + 1), timeout_s=timeout_s)
        if len(data) > limit:
            raise SandboxRequestError(f"{path}: more than {limit} bytes")
        return data

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644, timeout_s: float = 30.0) -> None:
        """Write a file, making its folders.

        Raises:
            SandboxRequestError: outside `workdir` and `scratch`, not a file, not writable, disk full, or too large.
        """
        body = data.encode() if isinstance(data, str) else data
        self._check_size(len(body), path)
        script = (
            '[ ! -e "$1" ] || [ -f "$1" ] || { echo "there is something else than a file" >&2; exit 1; }; '
            'mkdir -p -- "$(dirname -- "$1")" && cat > "$1" && chmod "$2" -- "$1"'
        )
        await self._transfer(script, self.resolve(path), f"{mode:o}", stdin=body, timeout_s=timeout_s)

    async def upload(self, local: Path, path: str = ".", *, timeout_s: float = 120.0) -> None:
        """Copy a file to `path`, or the contents of a folder into the folder `path`. Links are copied as links.

        Raises:
            SandboxRequestError: as `write`; or a link in the tree that leads out of it.
        """
        if await asyncio.to_thread(local.is_dir):
            packed = await asyncio.to_thread(pack_tree, local, self._transfer_limit)
            await self._unpack_inside(packed, path, timeout_s)
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
        packed = await self._pack_inside(path, timeout_s)
        await asyncio.to_thread(unpack_tree, packed, local, self._transfer_limit)

    async def session(self, *, timeout_s: float = 30.0) -> ShellSession:
        """A persistent shell: `cd`, exports and background jobs live from call to call."""
        from sparring.sandbox.session import ShellSession

        session = ShellSession(self)
        await session.start(timeout_s=timeout_s)
        self._sessions.append(session)
        return session

    async def snapshot(self, *, timeout_s: float = 120.0) -> Snapshot:
        """The image and the work folder's files."""
        return Snapshot(self.spec.image, await self._pack_inside(".", timeout_s))

    async def restore(self, snapshot: Snapshot, *, timeout_s: float = 120.0) -> None:
        """Make the work folder what it was at `snapshot`, of this or of another sandbox with the same image.

        Sessions are closed: their processes would go on writing.
        """
        if snapshot.image != self.spec.image:
            raise SandboxRequestError(f"a snapshot of image {snapshot.image!r} does not fit one of {self.spec.image!r}")
        await self.close_sessions()
        await self._transfer('find "$1" -mindepth 1 -delete', self.workdir, timeout_s=timeout_s)
        await self._unpack_inside(snapshot.work_tar, ".", timeout_s)

    async def close_sessions(self) -> None:
        for session in self._sessions:
            await session.close()
        self._sessions.clear()

    def resolve(self, path: str) -> str:
        """The absolute path that `path` names: relative to the work folder, which it may not leave but for `scratch`.

        A link inside the sandbox may lead anywhere in it; nothing of the host is there.

        Raises:
            SandboxRequestError: a NUL byte, or it leaves.
        """
        if "\0" in path or len(path) > 4096 or not _encodable(path):
            raise SandboxRequestError("a path has a NUL byte, a lone surrogate or more than 4096 characters")
        parts: list[str] = []
        for part in (PurePosixPath(self.workdir) / path).parts[1:]:
            if part == "..":
                if not parts:
                    raise SandboxRequestError(f"path {path!r} leaves the file system")
                parts.pop()
            else:
                parts.append(part)
        absolute = PurePosixPath("/", *parts)
        if not any(absolute.is_relative_to(root) for root in (self.workdir, self.scratch)):
            raise SandboxRequestError(f"path {path!r} is outside {self.workdir} and {self.scratch}")
        return str(absolute)

    @property
    def _transfer_limit(self) -> int:
        return self.spec.max_transfer_mib * MIB

    def _check_size(self, size: int, what: str) -> None:
        if size > self._transfer_limit:
            raise SandboxRequestError(f"{what}: {size} bytes, above max_transfer_mib = {self.spec.max_transfer_mib}")

    async def _pack_inside(self, path: str, timeout_s: float) -> bytes:
        script = 'cd -- "$1" && tar -cf - . | head -c "$2"'
        return await self._transfer(script, self.resolve(path), str(self._transfer_limit + 1), timeout_s=timeout_s)

    async def _unpack_inside(self, packed: bytes, path: str, timeout_s: float) -> None:
        # tar runs inside, with the sandbox's own rights: what an archive does there, any command could do.
        script = 'mkdir -p -- "$1" && tar -xf - --no-same-owner -C "$1"'
        await self._transfer(script, self.resolve(path), stdin=packed, timeout_s=timeout_s)

    async def _transfer(self, script: str, *args: str, stdin: bytes = b"", timeout_s: float) -> bytes:
        """Run a fixed script with the bytes' limit on its output; `args` reach it as "$1", "$2", never as code."""
        stdout, stderr = bytearray(), BoundedOutput(4096)
        limit = self._transfer_limit

        def on_output(stream: int, data: bytes) -> None:
            if stream == 2:
                stderr.feed(data)
            elif len(stdout) <= limit:
                stdout.extend(data)

        argv = ["/bin/sh", "-c", script, "sh", *args]
        exit_code, duration_s, timed_out = await self._run(argv, on_output, timeout_s=timeout_s, stdin=stdin)
        if timed_out:
            # A pipe in the place of a file keeps whoever opens it waiting: then the sandbox itself still answers.
            answers = (await self._run(["true"], lambda *_: None, timeout_s=_PROBE_S))[0] == 0
            error = SandboxRequestError if answers else SandboxError
            raise error(f"{args[0]}: the transfer did not end within {duration_s:.1f} s")
        self._check_size(len(stdout), args[0])
        if exit_code != 0:
            raise SandboxRequestError(f"{args[0]}: {stderr.text().strip() or f'exit code {exit_code}'}")
        return bytes(stdout)

    async def _run(
        self, argv: Sequence[str], on_output: OnOutput, *, timeout_s: float, **options: Any
    ) -> tuple[int, float, bool]:
        """Run to the end under a deadline: exit code, duration, whether the time ran out."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        for _ in range(_RETRIES):
            try:
                return await self._run_once(argv, on_output, timeout_s=max(0.1, until - loop.time()), **options)
            except CommandNotStarted:
                if not await self.alive():
                    raise
            await self.clear()  # what earlier commands left behind has taken all processes there may be
        return await self._run_once(argv, on_output, timeout_s=max(0.1, until - loop.time()), **options)

    async def _run_once(
        self,
        argv: Sequence[str],
        on_output: OnOutput,
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> tuple[int, float, bool]:
        if not argv or any("\0" in argument or not _encodable(argument) for argument in argv):
            raise SandboxRequestError(f"a command needs a program, and no NUL or lone surrogate: {list(argv)!r:.200}")
        check_env(env or {})
        loop = asyncio.get_running_loop()
        called = loop.time()
        complaint = bytearray()

        def heard(stream: int, data: bytes) -> None:
            if stream == 2 and len(complaint) < len(_NO_FORK):
                complaint.extend(data[: len(_NO_FORK)])
            on_output(stream, data)

        try:
            async with asyncio.timeout(timeout_s + KILL_GRACE_S):
                process = await self.spawn(
                    argv, heard, stdin=bool(stdin), env=env, cwd=cwd, user=user, timeout_s=timeout_s
                )
        except TimeoutError:
            raise SandboxError(f"{self}: no command could be started within {timeout_s:.3g} s; overloaded?") from None
        started = loop.time()
        killed = False
        try:
            if stdin:
                process.write(stdin)
                process.close_stdin()
            await asyncio.wait([process.finished], timeout=called + timeout_s + KILL_GRACE_S - loop.time())
            if not process.finished.done():
                killed = True
                process.kill()
                await asyncio.wait([process.finished], timeout=called + timeout_s + DEADLINE_GRACE_S - loop.time())
        finally:
            # Cancelled, or killed without an end so far: ending goes on without the caller, who may call again.
            if not process.finished.done():
                process.kill()
        duration_s = loop.time() - started
        if killed and duration_s < timeout_s:
            raise SandboxError(f"{self}: starting a command took {started - called:.1f} s of its {timeout_s:.3g} s")
        if not process.finished.done():
            return 137, duration_s, True
        exit_code = process.finished.result()
        if exit_code == 125 and complaint.startswith(_NO_FORK):
            raise CommandNotStarted(f"{self}: {complaint.decode(errors='replace')}")
        return exit_code, duration_s, killed or (exit_code in (124, 137) and duration_s >= timeout_s)

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


def _encodable(text: str) -> bool:
    """Whether it can be an argument: models write lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
