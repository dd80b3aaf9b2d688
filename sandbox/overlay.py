"""A root file system with a copy-on-write overlay, in a mount namespace that nobody else sees.

The upper side is a tmpfs of bounded size. As root the namespace is made by a thread and held by a descriptor: no
process, no folder, and the kernel takes it all away when we end, however we end. Without root a process of its own
holds it (this file, run as a script), because only a process with one thread may enter a new user namespace.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparring.sandbox.process import HostProcess

__all__ = ["Overlay", "OverlayPlan"]

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/tmp:/bin/sh\n"
_GROUP = "root:x:0:\nagent:x:1000:\n"
_TOP_LINKS = ("bin", "sbin", "lib", "lib64")


@dataclass(frozen=True)
class OverlayPlan:
    """What to mount.

    Attributes:
        mount_point: a folder of the host over which, in the new namespace alone, everything is mounted.
        lower: the root file system below the overlay, or "/usr": the host's, with a bare root around it.
        size_mib: of the tmpfs, which holds all that is written.
        owner: user and group id, outside, of the work folder.
        workdir: absolute path of the work folder inside.
        etc_files, etc_folders: names to make in a bare root's /etc, for something to be bound over them.
        options: further overlayfs mount options.
    """

    mount_point: str
    lower: str
    size_mib: int
    owner: int
    workdir: str
    etc_files: tuple[str, ...] = ()
    etc_folders: tuple[str, ...] = ()
    options: str = ""

    @property
    def root(self) -> str:
        """The new root, as seen in the namespace."""
        return f"{self.mount_point}/root"

    def mount(self) -> None:
        """In a mount namespace of this thread's own, where it has the right to: mount it all.

        Raises:
            OSError: the kernel refused.
        """
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
        _mount("tmpfs", self.mount_point, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={self.size_mib}m,mode=755")
        for name in ("upper", "work", "root"):
            os.mkdir(f"{self.mount_point}/{name}")
        bare = self.lower == "/usr"
        at = self.root if bare else f"{self.mount_point}/upper"
        for name in ("tmp", "etc", "proc", "dev", self.workdir.lstrip("/")):
            os.makedirs(f"{at}/{name}", exist_ok=True)
        os.chmod(f"{at}/tmp", 0o1777)
        os.chown(f"{at}{self.workdir}", self.owner, self.owner)
        for name, text in (("passwd", _PASSWD), ("group", _GROUP), *((name, "") for name in self.etc_files)):
            with open(f"{at}/etc/{name}", "w") as file:
                file.write(text)
        for name in self.etc_folders:
            os.mkdir(f"{at}/etc/{name}")
        if bare:
            os.mkdir(f"{self.root}/usr")
            for name in _TOP_LINKS:
                os.symlink(f"usr/{name}", f"{self.root}/{name}")
        upper = f"upperdir={self.mount_point}/upper,workdir={self.mount_point}/work"
        target = f"{self.root}/usr" if bare else self.root
        _mount("overlay", target, "overlay", 0, f"lowerdir={self.lower},{upper}{self.options}")


class Overlay:
    """A mounted plan: `enter` says how a command gets there. Held until `close`."""

    def __init__(self, plan: OverlayPlan) -> None:
        self.plan = plan
        self._namespace = -1
        self.holder: HostProcess | None = None

    async def open(self, *, timeout_s: float) -> None:
        """Mount it.

        Raises:
            OSError: the kernel refused, or it took too long.
        """
        if os.geteuid() == 0:
            await self._open_by_thread()
        else:
            await self._open_by_process(timeout_s)

    async def _open_by_thread(self) -> None:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[int] = loop.create_future()

        def settle(namespace: int, error: OSError | None) -> None:
            if opened.cancelled():
                if namespace >= 0:
                    os.close(namespace)
            elif error is not None:
                opened.set_exception(error)
            else:
                opened.set_result(namespace)

        def make() -> None:
            # A thread of its own, which ends here: its namespace is not that of the rest of this process any more.
            try:
                _check(_libc().unshare(_CLONE_NEWNS), "unshare")
                self.plan.mount()
                namespace, error = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), None
            except OSError as caught:
                namespace, error = -1, caught
            loop.call_soon_threadsafe(settle, namespace, error)

        Thread(target=make, daemon=True, name="sparring-overlay").start()
        self._namespace = await opened

    async def _open_by_process(self, timeout_s: float) -> None:
        from sparring.sandbox.process import HostProcess

        output = bytearray()
        ready = asyncio.get_running_loop().create_future()

        def on_output(_: int, data: bytes) -> None:
            output.extend(data[: 4096 - len(output)])
            if b"ready\n" in output and not ready.done():
                ready.set_result(0)

        unshare = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private", "--"]
        argv = [*unshare, sys.executable, "-IS", __file__, json.dumps(asdict(self.plan))]
        holder = HostProcess(on_output)
        await holder.start(argv, env={"PATH": os.defpath}, stdin=True)
        self.holder = holder
        waiting = [ready, holder.finished]
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise OSError(output.decode(errors="replace").strip()[-300:] or f"no answer within {timeout_s:g} s")

    @property
    def alive(self) -> bool:
        return self._namespace >= 0 or (self.holder is not None and not self.holder.finished.done())

    def enter(self, user: int) -> tuple[list[str], Sequence[int]]:
        """How a command line that goes there begins, as `user` where we are root, and the descriptors it needs."""
        if self.holder is not None:
            target = ["--target", str(self.holder.pid), "--user", "--mount", "--preserve-credentials"]
            return ["nsenter", *target, "--"], ()
        entry = [f"--mount=/proc/self/fd/{self._namespace}", "--setgid", str(user), "--setuid", str(user)]
        return ["nsenter", *entry, "--"], (self._namespace,)

    async def close(self) -> None:
        """Let go of it; it is gone when the last command in it is. Idempotent."""
        namespace, self._namespace = self._namespace, -1
        if namespace >= 0:
            os.close(namespace)
        if self.holder is not None:
            self.holder.kill()
            await asyncio.wait([self.holder.finished], timeout=5.0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    result = _libc().mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(result, f"mount {kind or 'private'} at {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _hold(plan: OverlayPlan) -> None:
    """Mount, say so, and stay until whoever started us goes away."""
    plan.mount()
    os.write(1, b"ready\n")
    sys.stdin.buffer.read()


if __name__ == "__main__":
    _hold(OverlayPlan(**json.loads(sys.argv[1])))
