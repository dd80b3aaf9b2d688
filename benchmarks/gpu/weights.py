"""How long decoding stands still for new weights, what is lost, and what updates cost in throughput."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks._report import Row
from benchmarks.gpu._load import closed_loop
from benchmarks.gpu._servers import attached, random_model, running
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.sglang import SGLangEngine

# Most seconds that decoding may stand still. SPARRING_BENCH_SHAPES takes some of them alone.
SHAPES = {"qwen3-0.6b": 0.070, "qwen3-1.7b": 0.150}
CONCURRENCY = 256
BEFORE_S = 15.0
WINDOW_S = 60.0
EVERY_S = 1.0


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    return asyncio.run(_measure(out))


async def _measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = []
    details: dict[str, Any] = {}
    wanted = os.environ.get("SPARRING_BENCH_SHAPES", " ".join(SHAPES)).split()
    models = {shape: random_model(shape) for shape in wanted}
    # Side by side they start in the time of one; each is measured alone.
    async with AsyncExitStack() as stack:
        entered = (stack.enter_async_context(running(models[shape], shape, logs=out)) for shape in wanted)
        urls = {name: url for each in await asyncio.gather(*entered) for name, url in each.items()}
        for shape in wanted:
            bound = SHAPES[shape]
            async with attached(models[shape], urls[shape]) as engine:
                found = await _one(engine, models[shape])
            details[shape] = found
            kept = found["with_updates"] / found["without"]
            rows += [
                Row(f"{shape}: pause, median", found["pause_median_s"] * 1e3, "ms", bound * 1e3, at_most=True),
                Row(f"{shape}: pause, longest", found["pause_max_s"] * 1e3, "ms"),
                Row(f"{shape}: requests lost", found["lost"], "", None),
                Row(f"{shape}: throughput kept, an update a second", kept * 100, "%", 90),
                Row(f"{shape}: throughput without updates", found["without"], "tokens/s"),
            ]
            print(found, flush=True)
    return rows, details


async def _one(engine: SGLangEngine, folder: Path) -> dict[str, Any]:
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    lost = mixed = 0
    pauses: list[float] = []
    stages: list[float] = []

    async def ask(prompt: list[int], tokens: int) -> int:
        nonlocal lost, mixed
        completion = await engine.generate(prompt, SamplingParams(max_new_tokens=tokens))
        lost += completion.finish_reason == "aborted" or len(completion.token_ids) < tokens
        assert completion.policy_versions == sorted(completion.policy_versions)
        mixed += len(set(completion.policy_versions)) > 1
        return len(completion.token_ids)

    async def load(seconds: float) -> float:
        result = await closed_loop(ask, concurrency=CONCURRENCY, warm_s=3.0, measure_s=seconds, lengths=(300, 800))
        print(result, f"{len(pauses)} updates, {lost} requests lost", flush=True)  # also where what follows fails
        return result.tokens_per_s

    async def update() -> None:
        while True:
            began = time.perf_counter()
            version = engine.version + 1
            staged = await engine.stage_weights(version, trained.named_parameters())
            stages.append(time.perf_counter() - began)
            await engine.pause("keep")
            await engine.update_weights(version, staged)
            await engine.resume()
            pauses.append(engine.last_pause_s)
            await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))

    without = await load(BEFORE_S)
    updating = asyncio.create_task(update())
    try:
        with_updates = await load(WINDOW_S)
        if updating.done():
            updating.result()
    finally:
        updating.cancel()
        await asyncio.wait({updating})
        if engine._paused:
            await engine.resume()
    return {
        "without": without,
        "with_updates": with_updates,
        "window_s": WINDOW_S,
        "concurrency": CONCURRENCY,
        "updates": len(pauses),
        "pause_median_s": statistics.median(pauses),
        "pause_max_s": max(pauses),
        "stage_median_s": statistics.median(stages),
        "lost": lost,
        "requests_of_several_versions": mixed,
    }
