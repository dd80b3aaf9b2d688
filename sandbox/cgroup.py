"""A control group for one bubblewrap sandbox: memory, processes and processor time, version 1 or 2 of cgroups(7)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sparring.sandbox.owner import Owner

__all__ = ["ControlGroup", "cgroup_bases", "reap_cgroups"]

_PREFIX = "sparring."
_NEEDED = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000


@functools.cache
def cgroup_bases() -> dict[str, Path]:
    """For each of memory, pids and cpu the folder that groups can be made in; empty where this process may not.

    Under version 2 it is the nearest ancestor of our own group that hands the three down.
    """
    own: dict[str, str] = {}
    mounts: dict[str, Path] = {}
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own.update(dict.fromkeys(controllers.split(","), path))
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, tail = line.partition(" - ")
            kind, _, options = tail.split(" ", 2)
            for name in options.split(",") if kind == "cgroup" else [""] if kind == "cgroup2" else []:
                mounts[name] = Path(fields.split(" ")[4])
    except (OSError, ValueError):
        return {}
    if all(name in own and name in mounts for name in _NEEDED):
        found = {name: mounts[name] / own[name].lstrip("/") for name in _NEEDED}
        found = {name: base if base.is_dir() else mounts[name] for name, base in found.items()}
    elif "" in mounts and "" in own:
        root = mounts[""]
        start = root / own[""].lstrip("/")
        ancestors = [base for base in (start, *start.parents) if base.is_relative_to(root)]
        handing = (b for b in ancestors if set(_NEEDED) <= set(_read(b / "cgroup.subtree_control").split()))
        base = next(handing, None)
        found = dict.fromkeys(_NEEDED, base) if base else {}
    else:
        return {}
    probe = f"{_PREFIX}probe.{Owner.current()}"
    try:
        for base in set(found.values()):
            (base / probe).mkdir()
            (base / probe).rmdir()
    except OSError:
        return {}
    return found


@dataclass(frozen=True)
class ControlGroup:
    """`folders` to write a process id to `cgroup.procs` of; one under version 2, one for each controller under 1."""

    folders: tuple[Path, ...]

    @classmethod
    def create(cls, name: str, *, memory_bytes: int, pids: int, cpus: float) -> Self | None:
        """None where this process may not make groups."""
        bases = cgroup_bases()
        if not bases:
            return None
        full = f"{_PREFIX}{Owner.current()}.{name}"
        group = cls(tuple(dict.fromkeys(base / full for base in bases.values())))
        try:
            for folder in group.folders:
                folder.mkdir()
            quota = max(1000, int(cpus * _CPU_PERIOD_US))
            if len(group.folders) == 1:
                (folder,) = group.folders
                limits = {"memory.max": memory_bytes, "pids.max": pids, "cpu.max": f"{quota} {_CPU_PERIOD_US}"}
                optional = {"memory.swap.max": 0, "memory.oom.group": 0}
            else:
                limits = {"memory.limit_in_bytes": memory_bytes, "pids.max": pids, "cpu.cfs_quota_us": quota}
                optional = {"memory.memsw.limit_in_bytes": memory_bytes}
            for file, value in limits.items():
                group._find(file).write_text(str(value))
            for file, value in optional.items():
                with contextlib.suppress(OSError):  # swap accounting may be off
                    group._find(file).write_text(str(value))
        except OSError:
            for folder in group.folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            return None
        return group

    def oom_kills(self) -> int:
        text = "".join(_read(f / name) for f in self.folders for name in ("memory.events", "memory.oom_control"))
        return sum(map(int, re.findall(r"oom_kill (\d+)", text)))

    async def remove(self, *, timeout_s: float = 5.0) -> None:
        """Kill what is left in it, and remove it once that is gone."""
        end = asyncio.get_running_loop().time() + timeout_s
        while not all(_kill_and_remove(folder) for folder in self.folders):
            if asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(0.002)  # a killed process takes a moment to be gone

    def _find(self, file: str) -> Path:
        return next((f / file for f in self.folders if (f / file).exists()), self.folders[0] / file)


async def reap_cgroups(*, timeout_s: float = 5.0) -> None:
    """Kill and remove the groups of processes that have ended.

    Most of what was in them has died with its owner; but a bwrap that lost its parent in the instant between its start
    and its asking to die with it lives on.
    """
    for base in set(cgroup_bases().values()):
        for folder in base.glob(f"{_PREFIX}*"):
            owner = Owner.parse(folder.name.removeprefix(_PREFIX).removeprefix("probe.").split(".")[0])
            if owner is not None and owner.is_dead():
                await ControlGroup((folder,)).remove(timeout_s=timeout_s)


def _kill_and_remove(folder: Path) -> bool:
    """Whether it is gone."""
    for pid in map(int, _read(folder / "cgroup.procs").split()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid > 0:  # 0: a process of another namespace
                os.kill(pid, signal.SIGKILL)
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
