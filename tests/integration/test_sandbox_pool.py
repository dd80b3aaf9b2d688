"""Warm sandboxes are clean, used once, replaced, and gone when the provider is."""

import asyncio
import subprocess

import pytest

from sparring.errors import SandboxError
from sparring.sandbox import SandboxSpec, open_provider

pytestmark = [pytest.mark.slow]
KINDS = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
SPEC = SandboxSpec(memory_mib=128, disk_mib=32, pids=64)


@pytest.mark.parametrize("kind", KINDS)
async def test_warm_ones_are_handed_out_once_and_replaced(kind: str) -> None:
    async with await open_provider(kind, warm=2) as provider:
        pool = provider.pool(SPEC)
        await pool.ready()
        taken = [await provider.take(SPEC) for _ in range(5)]
        assert len({sandbox.id for sandbox in taken}) == 5
        for sandbox in taken:
            assert (await sandbox.exec("ls -A . /tmp; touch mine /tmp/mine", timeout_s=20)).stdout == ".:\n\n/tmp:\n"
        await pool.ready()
    for sandbox in taken:
        assert not await sandbox.alive(), "closing a provider ends what was taken from it too"


@pytest.mark.docker
async def test_a_warm_one_that_died_is_not_handed_out() -> None:
    async with await open_provider("docker", warm=1) as provider:
        pool = provider.pool(SPEC)
        await pool.ready()
        (_, dead) = pool._warm[0]
        kill = ["docker", "kill", f"sparring-{dead.id}"]
        await asyncio.to_thread(subprocess.run, kill, check=True, capture_output=True, timeout=20)
        sandbox = await provider.take(SPEC)
        assert sandbox.id != dead.id
        assert (await sandbox.exec("true", timeout_s=20)).ok


@pytest.mark.docker
async def test_a_start_that_fails_is_told_to_the_taker_not_to_the_background() -> None:
    async with await open_provider("docker", warm=2) as provider:
        spec = SandboxSpec(image="sparring/not-there:latest")
        await provider.pool(spec).ready()
        with pytest.raises(SandboxError, match="make images"):
            await provider.take(spec)


@pytest.mark.parametrize("kind", KINDS)
async def test_sixty_four_at_once_all_start(kind: str) -> None:
    async with await open_provider(kind) as provider:
        sandboxes = await asyncio.gather(*(provider.take(SPEC, timeout_s=110) for _ in range(64)))
        results = await asyncio.gather(*(sandbox.exec("echo up", timeout_s=60) for sandbox in sandboxes))
        assert [result.stdout for result in results] == ["up\n"] * 64
