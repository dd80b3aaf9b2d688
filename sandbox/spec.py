"""What a sandbox is made of and how much it may use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from sparring.errors import ConfigError
from sparring.sandbox.request import check_env

__all__ = ["MIB", "SandboxSpec"]

MIB = 1 << 20


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
