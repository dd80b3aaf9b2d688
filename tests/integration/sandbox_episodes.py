"""Plays episodes of a small coding task, for tests that kill this process: KIND EPISODES AT_ONCE DONE_FILE.

An episode that is done is a line of DONE_FILE; those are not played again. The first line printed is this process's
owner name. With EPISODES 0 it starts one sandbox, says its id and waits to be killed.
"""

import asyncio
import sys
from pathlib import Path

from sparring.sandbox import SandboxProvider, SandboxSpec, open_provider
from sparring.sandbox.owner import Owner

SPEC = SandboxSpec(memory_mib=128, disk_mib=32, pids=64)
TEST = """
from solution import middle
assert middle([3, 1, 2]) == 2
assert middle([5]) == 5
print("passed")
"""


async def episode(provider: SandboxProvider, number: int, done_file: Path) -> None:
    async with await provider.take(SPEC, timeout_s=300) as sandbox:
        session = await sandbox.session(timeout_s=60)
        await sandbox.write("test_it.py", TEST, timeout_s=60)
        await session.exec("printf 'def middle(x):\\n    return x[0]\\n' > solution.py", timeout_s=30)
        first = await session.exec("python3 test_it.py", timeout_s=30)
        await session.exec("sed -i 's/x\\[0\\]/sorted(x)[len(x) \\/\\/ 2]/' solution.py", timeout_s=30)
        second = await sandbox.exec("python3 test_it.py", timeout_s=30)
    if first.exit_code != 1 or second.stdout != "passed\n":
        raise SystemExit(f"episode {number} went wrong: {first} {second}")
    with done_file.open("a") as file:
        file.write(f"{number}\n")


async def main(kind: str, episodes: int, at_once: int, done: set[int], done_file: Path) -> None:
    print(Owner.current(), flush=True)
    async with await open_provider(kind) as provider:
        if episodes == 0:
            print((await provider.take(SPEC)).id, flush=True)
            await asyncio.Event().wait()
        room = asyncio.Semaphore(at_once)

        async def play(number: int) -> None:
            async with room:
                await episode(provider, number, done_file)

        await asyncio.gather(*(play(number) for number in range(episodes) if number not in done))


if __name__ == "__main__":
    file = Path(sys.argv[4])
    done = set(map(int, file.read_text().split())) if file.exists() else set()
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), done, file))
