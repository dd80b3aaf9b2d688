"""A call returns by its deadline, whatever hangs beside its command: here a sandbox whose daemon does, in one call."""

import asyncio
import time

import pytest

from sparring.errors import SandboxError
from sparring.sandbox import SandboxSpec
from sparring.sandbox.local import LocalSandbox
from sparring.sandbox.process import CommandNotStarted

pytestmark = pytest.mark.filterwarnings("ignore:LocalSandbox isolates nothing")


class Hung(LocalSandbox):
    """Its commands are never started while `full`, as at a process limit; one of its methods does not return."""

    def __init__(self, hangs_in: str = "", *, full: bool = False, start_s: float = 0.0) -> None:
        super().__init__(SandboxSpec())
        self.hangs_in, self.full, self.start_s = hangs_in, full, start_s
        self.calls: list[str] = []

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.hangs_in:
            await asyncio.Event().wait()

    async def spawn(self, *args, **options):
        await self._called("spawn")
        await asyncio.sleep(self.start_s)
        if self.full:
            raise CommandNotStarted("no process is left")
        return await super().spawn(*args, **options)

    async def alive(self) -> bool:
        await self._called("alive")
        return await super().alive()

    async def clear(self) -> None:
        await self._called("clear")

    async def oom_kills(self) -> int:
        await self._called("oom_kills")
        return 0


@pytest.mark.parametrize("hangs_in", ["alive", "clear"])
async def test_a_command_that_does_not_start_is_an_error_by_its_deadline(hangs_in: str) -> None:
    async with Hung(hangs_in, full=True) as sandbox:
        called = time.monotonic()
        with pytest.raises(SandboxError, match="no answer in the time of a command"):
            await sandbox.exec(["true"], timeout_s=0.1)
        assert time.monotonic() - called < 0.1 + 2


async def test_a_command_is_not_tried_again_once_its_time_is_over() -> None:
    async with Hung(full=True, start_s=0.1) as sandbox:
        with pytest.raises(CommandNotStarted):
            await sandbox.exec(["true"], timeout_s=0.05)
        assert sandbox.calls == ["spawn"]


async def test_within_its_time_it_is_tried_again_in_a_cleared_sandbox() -> None:
    async with Hung(full=True) as sandbox:
        with pytest.raises(CommandNotStarted):
            await sandbox.exec(["true"], timeout_s=10)
        assert sandbox.calls == ["spawn", "alive", "clear"] * 2 + ["spawn"]


@pytest.mark.parametrize("hangs_in", ["oom_kills", "alive"])
async def test_how_a_command_died_is_asked_for_no_longer_than_its_time(
    hangs_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("core", "live"):
        monkeypatch.setattr(f"sparring.sandbox.{room}.DEADLINE_GRACE_S", -9.9)
    async with Hung(hangs_in) as sandbox:
        with pytest.raises(SandboxError, match="no answer in the time of a command"):
            await sandbox.exec("kill -9 $$", timeout_s=10)
        session = await sandbox.session()
        with pytest.raises(SandboxError, match="no answer in the time of a command"):
            await session.exec("kill -9 $$", timeout_s=10)


async def test_a_session_that_cannot_be_started_again_is_an_error_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparring.sandbox.live._COME_BACK_S", 0.1)
    async with Hung() as sandbox:
        session = await sandbox.session()
        assert (await session.exec("exit 3", timeout_s=5)).exit_code == 3
        sandbox.hangs_in = "spawn"
        with pytest.raises(SandboxError, match="no answer in the time of a command"):
            await session.exec("true", timeout_s=0.1)
