"""Sandbox speed and cleanliness, paired with the plain docker CLI and SDK doing the same work in the same run.

    python -m benchmarks.sandbox [--rounds 15] [--many 1000] [--json FILE]

Compared are medians over rounds that alternate between the two sides. Needs a Docker daemon, the sandbox images and
bubblewrap; leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import docker

from benchmarks._report import Row, report
from sparring.sandbox import Sandbox, SandboxProvider, SandboxSpec, open_provider
from sparring.sandbox.audit import left_over, own_usage
from sparring.sandbox.docker import CONTAINER_ARGV, DEFAULT_IMAGE, container_options
from sparring.sandbox.owner import Owner

Side = tuple[str, Callable[[], Awaitable[Any]]]
SPEC = SandboxSpec(memory_mib=256, disk_mib=64, pids=64)
COMMAND = ["echo", "out"]
AT_ONCE = 64


async def timed(call: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = await call()
    return (time.perf_counter() - started) * 1000, result


def docker_run_flags() -> list[str]:
    """`container_options` as flags of `docker run`."""
    options = container_options(SPEC)
    flags = ["--detach", "--pull", "never", "--user", "0:0", "--entrypoint", CONTAINER_ARGV[0]]
    flags += ["--init", "--network", options["network_mode"], "--read-only", "--log-driver", "none"]
    flags += [word for path, mount in options["tmpfs"].items() for word in ("--tmpfs", f"{path}:{mount}")]
    flags += ["--cap-drop", "ALL", "--cap-add", "KILL", "--security-opt", "no-new-privileges"]
    flags += ["--pids-limit", str(options["pids_limit"]), "--memory", str(options["mem_limit"])]
    flags += ["--memory-swap", str(options["memswap_limit"]), "--cpus", str(SPEC.cpus)]
    return [*flags, "--shm-size", str(options["shm_size"])]


async def docker_run() -> str:
    """A hardened container by the CLI; its id."""
    arguments = ["run", *docker_run_flags(), DEFAULT_IMAGE, *CONTAINER_ARGV[1:]]
    process = await asyncio.create_subprocess_exec("docker", *arguments, stdout=subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    if process.returncode:
        raise SystemExit("docker run failed; are the images built (make images)?")
    return output.decode().strip()


async def first_output(provider: SandboxProvider) -> Sandbox:
    """Start a sandbox and wait for what a command in it prints."""
    sandbox = await provider.take(SPEC)
    assert (await sandbox.exec(COMMAND)).stdout == "out\n"
    return sandbox


def in_turn(sides: Sequence[Side], turn: int) -> Sequence[Side]:
    """The sides of a pair, the other one first every other time: the second runs while the daemon tidies the first."""
    return sides[::-1] if turn % 2 else sides


async def measure_speed(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each thing, one a round, the sides of each pair next to each other."""
    times: dict[str, list[float]] = {}

    async def note(name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        elapsed, result = await timed(call)
        times.setdefault(name, []).append(elapsed)
        return result

    client = docker.from_env()
    async with (
        await open_provider("docker") as cold,
        await open_provider("docker", warm=1) as warm,
        await open_provider("bubblewrap") as bubblewrap,
    ):
        running = await cold.take(SPEC)
        session = await running.session()
        container = client.containers.get(f"sparring-{running.id}")
        sdk = {"user": "1000:1000", "workdir": running.workdir, "demux": True}
        for number in range(rounds):
            starts: list[Side] = [("docker run", docker_run), ("cold start", lambda: cold.take(SPEC))]
            started = {name: await note(name, call) for name, call in in_turn(starts, number)}
            await started["cold start"].stop()
            await asyncio.to_thread(client.api.remove_container, started["docker run"], force=True)
            await warm.pool(SPEC).ready()
            taken = await note("warm take", lambda: warm.take(SPEC))
            await warm.pool(SPEC).ready()
            await taken.stop()
            for turn in range(4):
                execs: list[Side] = [
                    ("SDK exec", lambda: asyncio.to_thread(container.exec_run, COMMAND, **sdk)),
                    ("exec", lambda: running.exec(COMMAND)),
                ]
                for name, call in in_turn(execs, turn):
                    await note(name, call)
                await note("session exec", lambda: session.exec("echo out"))
                boxed = await note("bubblewrap to first output", lambda: first_output(bubblewrap))
                await boxed.stop()
    client.close()
    return times


async def failed_starts(kind: str) -> int:
    async with await open_provider(kind) as provider:  # type: ignore[arg-type]
        calls = (provider.take(SPEC, timeout_s=110) for _ in range(AT_ONCE))
        return sum(isinstance(one, BaseException) for one in await asyncio.gather(*calls, return_exceptions=True))


async def leak(kind: str, many: int) -> int:
    """How many things are left after `many` sandboxes, sixteen at a time."""
    room = asyncio.Semaphore(16)

    async def use() -> None:
        async with room, await provider.take(SPEC, timeout_s=300) as sandbox:
            assert (await sandbox.exec(COMMAND, timeout_s=60)).ok

    before = {}
    async with await open_provider(kind) as provider:  # type: ignore[arg-type]
        before = own_usage()
        await asyncio.gather(*(use() for _ in range(many)))
    after = own_usage()
    growth = {what: count - before[what] for what, count in after.items() if count > before[what]}
    left = left_over([Owner.current()])
    if growth or left:
        counts = {what: len(which) for what, which in left.items()}
        print(f"{kind}: left {counts}, grown {growth}", file=sys.stderr)
    return sum(growth.values()) + sum(map(len, left.values()))


async def main(rounds: int, many: int, json_path: str | None) -> int:
    times = await measure_speed(rounds)
    median = {name: statistics.median(values) for name, values in times.items()}
    rows = [Row(name, value, "ms") for name, value in median.items()]
    rows += [
        Row("cold start / docker run", median["cold start"] / median["docker run"], "x", 1.2, at_most=True),
        Row("docker run / warm take", median["docker run"] / median["warm take"], "x", 10),
        Row("exec / SDK exec", median["exec"] / median["SDK exec"], "x", 1.1, at_most=True),
        Row("SDK exec / session exec", median["SDK exec"] / median["session exec"], "x", 5),
        Row("cold start / bubblewrap", median["cold start"] / median["bubblewrap to first output"], "x", 10),
    ]
    for kind in ("docker", "bubblewrap"):
        failed = await failed_starts(kind)
        rows.append(Row(f"failed starts of {AT_ONCE} at once, {kind}", failed, "", 0, at_most=True))
    for kind in ("docker", "bubblewrap"):
        started = time.monotonic()
        left = await leak(kind, many)
        rows.append(Row(f"left after {many} sandboxes, {kind}", left, "", 0, at_most=True))
        rows.append(Row(f"sandboxes used in a second, {kind}", many / (time.monotonic() - started), ""))
    return report("Sandboxes", rows, json_path, {"rounds": rounds, "times_ms": times})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--many", type=int, default=1000)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.rounds, arguments.many, arguments.json)))
