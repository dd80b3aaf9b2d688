"""Many sandboxes, and processes killed at random moments: afterwards nothing is left. CI runs a tenth of each."""

import asyncio
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.sandbox import SandboxSpec, open_provider
from sparring.sandbox.audit import descendants, left_over, own_usage
from sparring.sandbox.owner import Owner, start_ticks

EPISODES = Path(__file__).parent / "sandbox_episodes.py"
KINDS = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
SPEC = SandboxSpec(memory_mib=128, disk_mib=32, pids=64)
AT_ONCE = 16
STALLED_S = 120.0  # without one more sandbox or episode done, on the busiest machine
full = [pytest.mark.long, pytest.mark.timeout(7200)]
tenth = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What other processes keep in the machine's is not counted. Near the root, for sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [pytest.param(100, marks=tenth), pytest.param(1000, marks=full)])
async def test_after_many_sandboxes_nothing_is_left(
    kind: str, count: int, own_temporary_folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, tickets = time.monotonic(), iter(range(1, count + 1))

    async def use() -> None:
        async with asyncio.timeout(STALLED_S), await provider.take(SPEC, timeout_s=STALLED_S) as sandbox:
            assert (await sandbox.exec("echo x > f; cat f", timeout_s=60)).stdout == "x\n"

    async def work() -> None:
        for number in tickets:
            await use()
            if number % 100 == 0:
                with capsys.disabled():
                    rate = number / (time.monotonic() - begun)
                    print(f"\n{kind}: {number} of {count} sandboxes, {rate:.1f} a second", flush=True)

    async with await open_provider(kind) as provider:
        await use()  # libraries and connections that stay open are opened by now
        before = own_usage()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
        after = own_usage()
        growth = {what: after[what] - before[what] for what in before if after[what] > before[what]}
        # The daemon's connection pool may hold one connection a thread.
        assert growth.pop("descriptors", 0) <= 32
        assert growth == {}
        assert left_over([Owner.current()]) == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("episodes", "kills"),
    [pytest.param(10, 1, marks=tenth, id="tenth"), pytest.param(100, 10, marks=full, id="full")],
)
def test_episodes_killed_at_random_moments_leave_nothing(kind: str, episodes: int, kills: int, tmp_path: Path) -> None:
    done_file = tmp_path / "done"
    owners, started = [], set[tuple[int, int | None]]()
    chance = random.Random(episodes)
    for run in range(kills + 1):
        arguments = [sys.executable, str(EPISODES), kind, str(episodes), str(AT_ONCE), str(done_file)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            owners.append(process.stdout.readline().strip())
            if run < kills:
                share = episodes / (kills + 1)
                wait_for_episodes(process, done_file, math.ceil((run + chance.random()) * share) - 1)
                time.sleep(chance.uniform(0, 0.1))
                assert process.poll() is None, "it was to be killed at work"
                started |= {(pid, start_ticks(pid)) for pid in descendants(process.pid)}
            else:
                assert process.wait(episodes * STALLED_S) == 0
        finally:
            process.kill()
            process.wait()
    assert sorted(map(int, done_file.read_text().split())) == list(range(episodes))
    assert left_over(map(Owner.parse, owners)) == {}
    assert [pid for pid, ticks in started if ticks is not None and start_ticks(pid) == ticks] == []


def wait_for_episodes(process: subprocess.Popen[str], done_file: Path, target: int) -> None:
    """Until so many are done; not if none has been for too long."""
    done, at = -1, time.monotonic()
    while done < target:
        now = len(done_file.read_text().split()) if done_file.exists() else 0
        done, at = (now, time.monotonic()) if now > done else (done, at)
        assert process.poll() is None, f"it ended by itself after {done} of {target} episodes"
        assert time.monotonic() < at + STALLED_S, f"stuck at {done} of {target} episodes"
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.docker
def test_the_next_start_removes_a_dead_runs_container_and_no_live_ones(tmp_path: Path) -> None:
    runs = []
    try:
        for _ in range(2):
            arguments = [sys.executable, str(EPISODES), "docker", "0", "1", str(tmp_path / "done")]
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
            runs.append(process)
            assert process.stdout is not None
        lines = [(run.stdout.readline().strip(), run.stdout.readline()) for run in runs if run.stdout]
        (dead, live), (dead_owner, live_owner) = runs, [owner for owner, _ in lines]
        dead.kill()
        dead.wait()
        assert left_over([Owner.parse(dead_owner)])

        async def next_start() -> None:
            async with await open_provider("docker"):
                pass

        asyncio.run(next_start())
        assert left_over([Owner.parse(dead_owner)]) == {}
        containers = left_over([Owner.parse(live_owner)])["containers"]
        assert len(containers) == 1
        inspect = ["docker", "inspect", "--format", "{{.State.Running}}", *containers]
        assert subprocess.run(inspect, capture_output=True, text=True, check=True, timeout=20).stdout == "true\n"
        live.terminate()
    finally:
        for process in runs:
            process.kill()
            process.wait()
