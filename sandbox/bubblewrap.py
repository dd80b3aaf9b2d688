"""Sandboxes without a daemon: bubblewrap over a copy-on-write overlay.

A sandbox is an overlay in a mount namespace of its own and a control group. Each command enters that namespace, drops
to an unprivileged user and runs under `bwrap` in process, network, user and other namespaces of its own, so that
killing it ends all that it started.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar

from sparring.errors import ConfigError, SandboxError
from sparring.sandbox.cgroup import ControlGroup, reap_cgroups
from sparring.sandbox.command import held_to, in_folder
from sparring.sandbox.core import Sandbox
from sparring.sandbox.overlay import Overlay, OverlayPlan
from sparring.sandbox.process import CommandNotStarted, HostProcess, OnOutput
from sparring.sandbox.provider import SandboxProvider
from sparring.sandbox.seccomp import seccomp_program
from sparring.sandbox.spec import MIB, SandboxSpec

__all__ = ["BubblewrapProvider", "BubblewrapSandbox"]

# Who a command is outside its user namespace, where root starts it: an account that owns nothing.
_NOBODY = 65534
_TOOLS = ("bwrap", "unshare", "nsenter", "prlimit", "timeout")
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat"}
_SHM_BYTES = 16 * MIB
# Where `make images` leaves a root file system, and of the host's /etc what its /usr is of little use without.
_DEFAULT_ROOT = Path(os.environ.get("SPARRING_ROOTFS", "/var/lib/sparring/rootfs"))
_HOST_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl", "ca-certificates", "mime.types")

# Joins the control groups named in $1, then becomes the command.
_JOIN = 'for g in $1; do echo 0 > "$g/cgroup.procs" || exit 125; done; shift; exec "$@"'


class _BubblewrapProcess(HostProcess):
    """A command under bwrap, which says on `status` whether an exit code is the command's or a failure of its own.

    Args:
        status: a descriptor to read from, which is closed with the command.
    """

    def __init__(self, on_output: OnOutput, status: int) -> None:
        super().__init__(self._tap(on_output))
        self._status: int | None = status
        self._first_error = b""

    def _tap(self, on_output: OnOutput) -> OnOutput:
        def tapped(stream: int, data: bytes) -> None:
            if stream == 2 and len(self._first_error) < 500:
                self._first_error += data[:500]
            on_output(stream, data)

        return tapped

    def last_words(self) -> bytes:
        """What bwrap said on `status`, which is closed then; nothing the next time."""
        status, self._status = self._status, None
        if status is None:
            return b""
        try:
            return os.read(status, 4096)
        except BlockingIOError:  # killed before it spoke, and not yet gone
            return b""
        finally:
            os.close(status)

    def _conclude(self, exit_code: int) -> None:
        said = self.last_words()
        # A signal ends the whole chain of programs without a word, and is the command's fate; a plain exit of
        # anything but the command is a failure to run it.
        if b'"exit-code"' in said or exit_code > 128:
            self.finished.set_result(exit_code)
        else:
            reason = self._first_error.decode(errors="replace").strip()
            self.finished.set_exception(CommandNotStarted(f"bubblewrap could not run a command: {reason or exit_code}"))


class BubblewrapSandbox(Sandbox):
    """A root file system with a copy-on-write overlay; each command is a bubblewrap container of its own.

    Files are shared by the commands of a sandbox; processes are not, and end with the command, or the session, that
    started them. `spec.image` is a folder with a root file system, "/usr" for the host's, or "": what `make images`
    left in SPARRING_ROOTFS (default /var/lib/sparring/rootfs) if it is there, else the host's /usr.
    """

    kind: ClassVar[str] = "bubblewrap"

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        if spec.network:
            raise ConfigError("a bubblewrap sandbox has no network; an allow-list needs Docker")
        if spec.image not in ("", "/usr") and not (Path(spec.image) / "usr").is_dir():
            raise ConfigError(f"bubblewrap's image is a folder with a root file system, not {spec.image!r}")
        if any(character in spec.image for character in ":,\\"):
            raise ConfigError(f"overlayfs takes no ':', ',' or backslash in a path: {spec.image!r}")
        image = spec.image or (str(_DEFAULT_ROOT) if (_DEFAULT_ROOT / "usr").is_dir() else "/usr")
        self._lower = str(Path(image).resolve())
        self._overlay: Overlay | None = None
        self._group: ControlGroup | None = None
        self._processes: set[_BubblewrapProcess] = set()
        self._seccomp = seccomp_program()

    async def _start(self, timeout_s: float) -> None:
        self._group = ControlGroup.create(
            self.id, memory_bytes=self.spec.total_memory_mib * MIB, pids=self.spec.pids, cpus=self.spec.cpus
        )
        is_root = os.geteuid() == 0
        files, folders = _host_etc() if self._lower == "/usr" else ((), ())
        self._overlay = Overlay(
            OverlayPlan(
                mount_point=_mount_point(self._lower),
                lower=self._lower,
                size_mib=self.spec.disk_mib + self.spec.tmp_mib,  # one overlay holds both
                owner=_NOBODY if is_root else 0,
                workdir=self.workdir,
                etc_files=files,
                etc_folders=folders,
                options="" if is_root else ",userxattr",
            )
        )
        try:
            await self._overlay.open(timeout_s=timeout_s)
        except OSError as error:
            raise SandboxError(
                f"bubblewrap's overlay could not be mounted: {error}; it needs root, or unprivileged user namespaces "
                "(sysctl kernel.unprivileged_userns_clone=1) and Linux 5.11"
            ) from error

    async def clear(self) -> None:
        processes = list(self._processes)
        for process in processes:
            process.kill()
        if processes:
            await asyncio.wait([process.finished for process in processes], timeout=5.0)

    async def _stop(self) -> bool:
        await self.clear()
        if self._overlay is not None:
            await self._overlay.close()
        group, self._group = self._group, None
        if group is not None:
            await group.remove()
        return True

    async def alive(self) -> bool:
        return self._overlay is not None and self._overlay.alive

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
    ) -> _BubblewrapProcess:
        if self._overlay is None or not self._overlay.alive:
            raise SandboxError(f"{self} is not running; start it first")
        if user not in (None, "root", "0", "1000"):
            raise SandboxError(f"a bubblewrap sandbox has the users root and 1000, not {user!r}")
        uid = "0" if user in ("root", "0") else "1000"
        variables = _ENV | dict(self.spec.env) | dict(env or {})
        groups = " ".join(map(str, self._group.folders)) if self._group else ""
        enter, inherited = self._overlay.enter(_NOBODY)
        status, said = os.pipe()
        os.set_blocking(status, False)
        pass_fds = [said]
        if self._seccomp is not None:
            pass_fds.append(_readable(self._seccomp))
        command = [
            *("sh", "-c", _JOIN, "sh", groups),
            *enter,
            *(() if self._group else self._prlimit()),
            *("bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--uid", uid, "--gid", uid, "--hostname", "sandbox", "--clearenv"),
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
            *("--bind", self._overlay.plan.root, "/", "--proc", "/proc", "--dev", "/dev"),
            *(_bind_host_etc() if self._lower == "/usr" else ()),
            *("--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--json-status-fd", str(said), *(("--seccomp", str(pass_fds[1])) if self._seccomp is not None else ())),
            *("--chdir", self.workdir, "--", *in_folder(cwd, held_to(timeout_s, argv))),
        ]
        process = _BubblewrapProcess(on_output, status)
        try:
            await process.start(command, env=_HOST_ENV, stdin=stdin, pass_fds=[*pass_fds, *inherited])
        except BaseException as error:
            process.last_words()
            if not isinstance(error, OSError):
                raise
            raise SandboxError(f"{self} could not start a command: {error}") from error
        finally:
            for descriptor in pass_fds:
                os.close(descriptor)
        self._processes.add(process)
        process.on_finished(self._processes.discard)
        return process

    def _prlimit(self) -> list[str]:
        """Without control groups: memory of each process, and processes of the user. Weaker, and doctor says so."""
        memory = self.spec.memory_mib * MIB
        return ["prlimit", f"--as={memory}", f"--nproc={self.spec.pids}", "--core=0", "--"]

    async def oom_kills(self) -> int:
        return self._group.oom_kills() if self._group else 0


class BubblewrapProvider(SandboxProvider):
    """Sandboxes by bubblewrap: bwrap and util-linux, no daemon, and no root where user namespaces are open."""

    kind: ClassVar[str] = "bubblewrap"

    async def open(self) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=_HOST_ENV["PATH"]) is None]
        if missing:
            raise SandboxError(f"bubblewrap sandboxes need {', '.join(missing)}: apt-get install bubblewrap util-linux")
        await reap_cgroups()
        async with self.make(SandboxSpec(memory_mib=64, disk_mib=16)) as probe:
            result = await probe.exec(["true"], timeout_s=20.0)
        if not result.ok:
            raise SandboxError(
                f"bubblewrap does not work here: {result.stderr.strip()[-300:]}; unprivileged user namespaces may "
                "be off (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
            )

    def _make(self, spec: SandboxSpec) -> BubblewrapSandbox:
        return BubblewrapSandbox(spec)


_HOST_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def _readable(data: bytes) -> int:
    """A descriptor from which `data` can be read; it fits into a pipe."""
    reading, writing = os.pipe()
    try:
        os.write(writing, data)
    finally:
        os.close(writing)
    return reading


@functools.cache
def _host_etc() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files and the folders of `_HOST_ETC` that this host has."""
    there = [name for name in _HOST_ETC if (Path("/etc") / name).exists()]
    folders = tuple(name for name in there if (Path("/etc") / name).is_dir())
    return tuple(name for name in there if name not in folders), folders


def _bind_host_etc() -> list[str]:
    files, folders = _host_etc()
    return [word for name in (*files, *folders) for word in ("--ro-bind", f"/etc/{name}", f"/etc/{name}")]


def _mount_point(lower: str) -> str:
    """A folder to mount over in the holder's own namespace, which must not hide the lower folder."""
    for candidate in ("/mnt", "/media", "/srv", "/opt"):
        if os.path.isdir(candidate) and not PurePosixPath(lower).is_relative_to(candidate):
            return candidate
    raise SandboxError(f"none of /mnt, /media, /srv and /opt can be mounted over for {lower}")
