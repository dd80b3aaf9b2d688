"""A closed loop of requests against anything that generates, and what it got through.

    python -m benchmarks.gpu._load CONCURRENCY WARM_S MEASURE_S URL...      # in a process of its own

prints "warm" when its window begins, and at its end what it got through, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

__all__ = ["Load", "closed_loop", "raw_client", "raw_load"]

Ask = Callable[[list[int], int], Awaitable[int]]
"""Sample so many tokens after a prompt; returns how many came."""


@dataclass(frozen=True)
class Load:
    tokens_per_s: float
    requests: int
    seconds: float
    concurrency: int
    mean_tokens: float


async def closed_loop(
    ask: Ask, *, concurrency: int, warm_s: float = 4.0, measure_s: float = 8.0, prompt: int = 100,
    lengths: tuple[int, int] = (100, 460), vocabulary: int = 150_000, seed: int = 0,
    on_warm: Callable[[], None] = lambda: None,
) -> Load:  # fmt: skip
    """Keep `concurrency` requests running; count the tokens of those that end in the window after the warm-up.

    `on_warm` is called as the window begins. Lengths are uniform, so that requests end spread over time and the
    window's edges weigh little.
    """
    rng = random.Random(seed)
    ended: list[tuple[float, int]] = []
    began = time.perf_counter()
    until = began + warm_s + measure_s

    async def client() -> None:
        while time.perf_counter() < until:
            tokens = await ask([rng.randrange(vocabulary) for _ in range(prompt)], rng.randint(*lengths))
            ended.append((time.perf_counter(), tokens))

    clients = [asyncio.create_task(client()) for _ in range(concurrency)]
    try:
        await asyncio.sleep(warm_s)
        on_warm()
        await asyncio.sleep(until - time.perf_counter())
    finally:
        for each in clients:
            each.cancel()
        results = await asyncio.gather(*clients, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    counted = [tokens for at, tokens in ended if began + warm_s <= at < until]
    return Load(sum(counted) / measure_s, len(counted), measure_s, concurrency, sum(counted) / max(len(counted), 1))


def raw_client(*urls: str) -> tuple[Ask, Callable[[], Awaitable[None]]]:
    """Plain `/generate` with log-probabilities over keep-alive connections, round robin; and how to close it."""
    import itertools

    import aiohttp

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))
    turns = itertools.cycle(urls)

    async def ask(prompt: list[int], tokens: int) -> int:
        params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        async with session.post(next(turns) + "/generate", json=body) as response:
            answer = json.loads(await response.read())
        return len(answer["meta_info"]["output_token_logprobs"])

    return ask, session.close


async def raw_load(
    *urls: str, concurrency: int, warm_s: float, measure_s: float, on_warm: Callable[[], None] = lambda: None
) -> Load:
    """`closed_loop` over `raw_client`."""
    ask, close = raw_client(*urls)
    try:
        return await closed_loop(ask, concurrency=concurrency, warm_s=warm_s, measure_s=measure_s, on_warm=on_warm)
    finally:
        await close()


def main(concurrency: str, warm_s: str, measure_s: str, *urls: str) -> None:
    load = asyncio.run(
        raw_load(
            *urls, concurrency=int(concurrency), warm_s=float(warm_s), measure_s=float(measure_s),
            on_warm=lambda: print("warm", flush=True),
        )
    )  # fmt: skip
    print(json.dumps(asdict(load)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
