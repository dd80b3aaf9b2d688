"""Where sampler and trainer disagree on log-probabilities, and what a setting costs and brings."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._report import Row
from benchmarks.gpu._load import closed_loop, raw_client
from benchmarks.gpu._prompts import chat_format, encoded, messages
from benchmarks.gpu._servers import attached, running
from sparring.backend.engines.base import Completion, SamplingParams
from sparring.backend.trainer.packing import Sample, pack, split_rows
from sparring.backend.trainer.policy import load_policy

PROMPTS, TOKENS = 96, 300


NAMES = ("default", "fp32 head", "deterministic")


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    model = Path(os.environ["SPARRING_BENCH_MODEL"])
    prompts = encoded(model, messages("train", PROMPTS))
    return asyncio.run(_measure(out, model, prompts))


async def _measure(out: Path, model: Path, prompts: list[list[int]]) -> tuple[list[Row], dict[str, Any]]:
    stop = tuple(chat_format(model).end_ids)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    async with running(model, *NAMES, logs=out) as urls:
        for name, url in urls.items():
            if url.startswith("error"):
                details[name] = {"error": url[-1500:]}
                continue
            async with attached(model, url) as engine:
                sampling = SamplingParams(max_new_tokens=TOKENS, stop_token_ids=stop)
                said = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
            ask, close = raw_client(url)
            load = await closed_loop(ask, concurrency=256, warm_s=2.0, measure_s=4.0)
            await close()
            details[name] = {"tokens_per_s": load.tokens_per_s}
            for trainer, dtype in (("bf16 trainer", torch.bfloat16), ("fp32 trainer", torch.float32)):
                drift = _drift(model, prompts, said, dtype)
                details[name][trainer] = drift
                rows.append(Row(f"{name}, {trainer}: mean |Δ log p|", drift["mean"], "nats"))
                rows.append(Row(f"{name}, {trainer}: p99", drift["p99"], "nats"))
            rows.append(Row(f"{name}: at concurrency 256", load.tokens_per_s, "tokens/s"))
            print(name, details[name], flush=True)
    return rows, details


def _drift(model: Path, prompts: list[list[int]], said: list[Completion], dtype: torch.dtype) -> dict[str, float]:
    policy, _ = load_policy(model, dtype)
    policy.cuda()
    samples = []
    for i, (prompt, completion) in enumerate(zip(prompts, said, strict=True)):
        tokens = np.array(prompt + completion.token_ids)
        actions = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[actions] = completion.logprobs
        ones = np.ones(len(tokens), np.float32)
        nothing = np.zeros(len(tokens))
        samples.append(Sample(tokens, actions, logprobs, nothing, nothing.astype(np.int32), ones, index=i))
    differences = []
    with torch.no_grad():
        for members in split_rows(samples, 8192):
            row = pack(members).to("cuda")
            differences.append((policy(row=row).logprobs - row.behaviour_logprobs).abs())
    found = torch.cat(differences)
    return {
        "mean": float(found.mean()),
        "p99": float(found.quantile(0.99)),
        "max": float(found.max()),
        "tokens": found.numel(),
    }
