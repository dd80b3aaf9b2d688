"""Generation through gateway and recorder, beside the server's own `/generate`, in the same run by the same client."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks._report import Row
from benchmarks.gpu._load import Load, closed_loop
from benchmarks.gpu._prompts import chat_format, encoded, messages
from benchmarks.gpu._servers import MAX_LENGTH, attached, running
from sparring.backend.engines.base import SamplingParams
from sparring.backend.gateway import Recorder

TOKENS = 300
CONCURRENCIES = [int(n) for n in os.environ.get("SPARRING_BENCH_CONCURRENCY", "64 256").split()]


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    model = Path(os.environ["SPARRING_BENCH_MODEL"])
    chats = messages("train", 512)
    return asyncio.run(_measure(out, model, chats, encoded(model, chats)))


async def _measure(
    out: Path, model: Path, chats: list[Any], prompts: list[list[int]]
) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = []
    details: dict[str, Any] = {}
    async with running(model, "default", logs=out) as urls:
        return await _compare(model, urls["default"], chats, prompts, rows, details)


async def _compare(
    model: Path, url: str, chats: list[Any], prompts: list[list[int]], rows: list[Row], details: dict[str, Any]
) -> tuple[list[Row], dict[str, Any]]:
    chat = chat_format(model)
    stop = list(chat.end_ids)
    async with attached(model, url) as engine, aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    ) as session:
        recorder = Recorder(engine, chat, SamplingParams(max_new_tokens=TOKENS), max_length=MAX_LENGTH)
        numbers = itertools.count()

        async def raw(_prompt: list[int], _tokens: int) -> int:
            prompt = prompts[next(numbers) % len(prompts)]
            params = {"max_new_tokens": TOKENS, "temperature": 1.0, "stop_token_ids": stop}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            async with session.post(url + "/generate", json=body) as response:
                return len(json.loads(await response.read())["meta_info"]["output_token_logprobs"])

        async def recorded(_prompt: list[int], _tokens: int) -> int:
            number = next(numbers)
            opened = recorder.open_session(str(number), turn_budget=1, token_budget=TOKENS)
            reply = await opened.chat(chats[number % len(chats)])
            recorder.close_session(str(number))
            return reply.usage.completion_tokens

        for concurrency in CONCURRENCIES:
            loads: dict[str, list[Load]] = {"raw": [], "gateway": []}
            for name in ("raw", "gateway", "gateway", "raw"):
                ask = raw if name == "raw" else recorded
                loads[name].append(await closed_loop(ask, concurrency=concurrency, warm_s=2.5, measure_s=5.0))
            speed = {name: sum(each.tokens_per_s for each in found) / 2 for name, found in loads.items()}
            rows.append(Row(f"/generate, concurrency {concurrency}", speed["raw"], "tokens/s"))
            rows.append(
                Row(f"gateway, concurrency {concurrency}", speed["gateway"], "tokens/s", 0.95 * speed["raw"])
            )
            details[str(concurrency)] = {name: [asdict(each) for each in found] for name, found in loads.items()}
            print(concurrency, speed, flush=True)
    return rows, details
