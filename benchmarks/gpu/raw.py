"""How fast the server samples by itself, and which of its settings make it so."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._report import Row
from benchmarks.gpu._load import Load, closed_loop, raw_client
from benchmarks.gpu._servers import running

NAMES = ("default", "second", "each prompt at once")
CONCURRENCY = 512


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    return asyncio.run(_measure(out))


async def _measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    model = Path(os.environ["SPARRING_BENCH_MODEL"])
    loads, details = dict[str, Load](), dict[str, Any]()
    async with running(model, *NAMES, logs=out) as urls:
        for name, url in urls.items():
            if url.startswith("error"):
                details[name] = {"error": url[-1500:]}
            elif name != "second":
                loads[name] = await _load(CONCURRENCY, url)
        if not (urls["default"] + urls["second"]).count("error"):
            loads["default, two servers, 256 each"] = await _load(CONCURRENCY, urls["default"], urls["second"])
        for concurrency in (1, 64, 256):
            loads[f"default, concurrency {concurrency}"] = await _load(concurrency, urls["default"])
    best = max(loads, key=lambda name: loads[name].tokens_per_s)
    rows = [Row(name, load.tokens_per_s, "tokens/s") for name, load in loads.items()]
    rows.append(Row(f"best: {best}", loads[best].tokens_per_s, "tokens/s", 40_000))
    return rows, details | {name: asdict(load) for name, load in loads.items()}


async def _load(concurrency: int, *urls: str) -> Load:
    ask, close = raw_client(*urls)
    try:
        await closed_loop(ask, concurrency=concurrency, warm_s=3.0, measure_s=1.0)  # kernels compile at first use
        load = await closed_loop(ask, concurrency=concurrency, warm_s=2.5, measure_s=6.0)
    finally:
        await close()
    print(f"{urls} concurrency {concurrency}: {load.tokens_per_s:,.0f} tokens/s", flush=True)
    return load
