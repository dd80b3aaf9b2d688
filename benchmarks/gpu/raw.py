"""How fast the server samples by itself, and which of its settings make it so."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._report import Row
from benchmarks.gpu._load import Load, closed_loop, raw_client
from benchmarks.gpu._servers import options, random_model, running

SHAPE = "qwen2.5-0.5b"
CONCURRENCY = 512


def variants() -> dict[str, Any]:
    skip = "--skip-tokenizer-init"  # the random model has no tokenizer
    return {
        "each prompt at once": options(skip, delay_prefill=0.0),
        "prompts gathered": options(skip),
        "prompts gathered, second server": options(skip),
        "prompts with decoding": options(skip, "--enable-mixed-chunk", delay_prefill=0.0),
    }


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    return asyncio.run(_measure(out))


async def _measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    model, loads, details = random_model(SHAPE), dict[str, Load](), dict[str, Any]()
    names = list(variants())
    async with running(model, *variants().values(), logs=out) as urls:
        for name, url in zip(names, urls, strict=True):
            if url.startswith("error"):
                details[name] = {"error": url[-1500:]}
            elif "second" not in name:
                loads[name] = await _load(CONCURRENCY, url)
        first, second = urls[1], urls[2]
        if not (first + second).count("error"):
            loads["two servers, 256 each"] = await _load(CONCURRENCY, first, second)
        for concurrency in (1, 64, 256):
            loads[f"prompts gathered, concurrency {concurrency}"] = await _load(concurrency, first)
    best = max(loads, key=lambda name: loads[name].tokens_per_s)
    rows = [Row(f"{SHAPE}: {name}", load.tokens_per_s, "tokens/s") for name, load in loads.items()]
    rows.append(Row(f"best: {best}", loads[best].tokens_per_s, "tokens/s", 40_000))
    return rows, details | {name: asdict(load) for name, load in loads.items()}


async def _load(concurrency: int, *urls: str) -> Load:
    ask, close = raw_client(*urls)
    try:
        await closed_loop(ask, concurrency=concurrency, warm_s=0.5, measure_s=1.0)
        load = await closed_loop(ask, concurrency=concurrency, warm_s=2.5, measure_s=5.0)
    finally:
        await close()
    print(f"{urls} concurrency {concurrency}: {load.tokens_per_s:,.0f} tokens/s", flush=True)
    return load
