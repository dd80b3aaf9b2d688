"""Who owns a container or a control group: one process of one boot, so that others can tell whether it lives."""

from __future__ import annotations

import functools
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Owner", "start_ticks"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Owner:
    """A process, told apart from later ones with the same id by its start time, and from those of other machines,
    boots and process namespaces by `place`.

    `str()` and `parse` are inverse to each other; the text fits a label and a folder name.
    """

    place: str
    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> Self:
        """This process. A fork is another owner."""
        return cls(_place(), os.getpid(), start_ticks(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None where the text is not an owner."""
        parts = text.split("_")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]))

    def __str__(self) -> str:
        return f"{self.place}_{self.pid}_{self.start_ticks}"

    def is_dead(self) -> bool:
        """True only if that process has certainly ended; another machine's is never known to be dead."""
        return self.place == _place() and start_ticks(self.pid) != self.start_ticks


@functools.cache
def _place() -> str:
    try:
        return f"{_BOOT_ID.read_text().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no /proc (macOS): nothing can be told of others, deadlines alone count
        return str(uuid.uuid4())


def start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid` (field 22 of proc(5) stat); None where there is no live process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
