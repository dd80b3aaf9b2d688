"""Where sandboxes come from: one backend with its connection, its warm pools and its clean-up."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Literal, Self, TypeAlias

from sparring.errors import ConfigError, SandboxError
from sparring.sandbox.core import Sandbox
from sparring.sandbox.pool import SandboxPool
from sparring.sandbox.spec import SandboxSpec

__all__ = ["SandboxKind", "SandboxProvider", "open_provider"]

SandboxKind: TypeAlias = Literal["auto", "docker", "bubblewrap", "local"]


class SandboxProvider(ABC):
    """Makes sandboxes of one kind. Opened and closed by `async with`; belongs to the event loop that opened it.

    Args:
        warm: sandboxes kept ready for each spec that was asked for.
    """

    kind: ClassVar[str]

    def __init__(self, *, warm: int = 0) -> None:
        self._warm = warm
        self._pools: dict[SandboxSpec, SandboxPool] = {}
        self._live: set[Sandbox] = set()
        self._starting = asyncio.Semaphore(4 * (os.cpu_count() or 1))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def open(self) -> None:
        """Make ready, and remove what dead runs left.

        Raises:
            SandboxError: this backend cannot be used here, with what to install or start.
        """

    @abstractmethod
    def _make(self, spec: SandboxSpec) -> Sandbox:
        """As `make`."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that is not started yet.

        Raises:
            ConfigError: this backend cannot meet the spec.
        """
        sandbox = self._make(spec)
        self._live.add(sandbox)
        sandbox.on_gone = self._live.discard
        return sandbox

    def pool(self, spec: SandboxSpec) -> SandboxPool:
        """The warm pool of a spec, made and filling from the first call on."""
        pool = self._pools.get(spec)
        if pool is None:
            pool = self._pools[spec] = SandboxPool(self.make, spec, self._warm, self._starting)
            pool.refill()
        return pool

    async def take(self, spec: SandboxSpec | None = None, *, timeout_s: float = 120.0) -> Sandbox:
        """A clean, started sandbox, warm if there is one; the caller stops it.

        Raises:
            SandboxError: none could be started.
        """
        return await self.pool(spec or SandboxSpec()).take(timeout_s=timeout_s)

    async def close(self) -> None:
        """Stop every sandbox that is left, warm or taken, and let go of the backend. Idempotent."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._live)))


async def open_provider(kind: SandboxKind = "auto", *, warm: int = 0) -> SandboxProvider:
    """An opened provider. `auto` is Docker if a daemon answers, else bubblewrap; never silently the local one.

    Raises:
        SandboxError: nothing that isolates is to be had here, with what to install.
        ConfigError: an unknown kind.
    """
    from sparring.sandbox.bubblewrap import BubblewrapProvider
    from sparring.sandbox.docker import DockerProvider
    from sparring.sandbox.local import LocalProvider

    kinds: dict[str, type[SandboxProvider]] = {
        "docker": DockerProvider,
        "bubblewrap": BubblewrapProvider,
        "local": LocalProvider,
    }
    if kind != "auto" and kind not in kinds:
        raise ConfigError(f"sandbox={kind!r} is none of auto, {', '.join(kinds)}")
    reasons = []
    for name in ("docker", "bubblewrap") if kind == "auto" else (kind,):
        provider = kinds[name](warm=warm)
        try:
            await provider.open()
        except SandboxError as error:
            await provider.close()
            if kind != "auto":
                raise
            reasons.append(f"{name}: {error}")
        else:
            return provider
    raise SandboxError(
        "no sandbox to run untrusted code in. Start a Docker daemon, or install bubblewrap (apt-get install "
        "bubblewrap); sandbox='local' isolates nothing and must be asked for. " + "; ".join(reasons)
    )
