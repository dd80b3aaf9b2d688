"""How much of the GPU's matrix rate a training step reaches.

FLOPs of a row of N tokens with U scored positions, sequences of s_i tokens: 6 x (parameters outside the embedding) x N,
6 x V x D x U for the head, and 6 x layers x heads x head dimension x sum of s_i^2 for causal attention. What the step
computes twice (the head's logits) is not counted.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks._report import Row
from benchmarks.gpu._servers import config_of
from sparring.backend.objectives import load_objective
from sparring.backend.objectives.base import Totals
from sparring.backend.trainer.compiled import compile_layers
from sparring.backend.trainer.head import install_head
from sparring.backend.trainer.packing import Sample, pack
from sparring.backend.trainer.step import loss_inputs

SHAPE, ROW_TOKENS, LENGTH, PROMPT, ROWS, STEPS = "qwen3-1.7b", 8192, 512, 128, 4, 4
PEAK_TFLOPS = 790.0  # seen for a large bf16 product on random data


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = []
    details: dict[str, Any] = {"product_tflops": _product(), "shape": SHAPE, "row_tokens": ROW_TOKENS}
    for compiled in (False, True):
        name = "compiled" if compiled else "eager"
        found = _steps(compiled, out)
        details[name] = found
        rows.append(Row(f"{SHAPE}, {name}: MFU", found["mfu"] * 100, "%", 40))
        rows.append(Row(f"{SHAPE}, {name}: tokens", found["tokens_per_s"], "tokens/s"))
        print(name, found, flush=True)
    rows.append(Row("8192^3 bf16 product here", details["product_tflops"], "TFLOP/s"))
    return rows, details


def _product() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return 2 * 8192**3 * 10 / (time.perf_counter() - began) / 1e12


def _steps(compiled: bool, out: Path) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    config = config_of(SHAPE)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    install_head(model, torch.bfloat16)
    if compiled:
        compile_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    objective = load_objective("default", {})
    batch = [_row(seed, config.vocab_size) for seed in range(ROWS)]
    packed = [pack(samples).to("cuda") for samples in batch]
    terms = sum(row.targets.numel() for row in packed)
    totals = Totals(tokens=terms, sequences=sum(len(samples) for samples in batch), groups=ROWS)

    def step() -> None:
        for row in packed:
            scores = model(row=row)
            objective.loss(loss_inputs(row, scores, totals)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    step()
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    _trace(step, out / f"trace-{'compiled' if compiled else 'eager'}.txt")
    flops = sum(_flops(model, config, row, samples) for row, samples in zip(packed, batch, strict=True))
    tokens, median = sum(row.tokens for row in packed), statistics.median(seconds)
    memory = torch.cuda.max_memory_allocated() / 2**30
    return {
        "step_s": seconds,
        "first_step_s": first_s,
        "tokens_per_s": tokens / median,
        "tflops": flops / median / 1e12,
        "mfu": flops / median / 1e12 / PEAK_TFLOPS,
        "peak_memory_gib": memory,
    }


def _row(seed: int, vocabulary: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(ROW_TOKENS // LENGTH):
        tokens = rng.integers(0, vocabulary, LENGTH + 1)
        actions = np.arange(LENGTH + 1) >= PROMPT
        logprobs = np.full(LENGTH + 1, -np.log(vocabulary), np.float32)
        lags, ones = np.zeros(LENGTH + 1, np.int32), np.ones(LENGTH + 1, np.float32)
        samples.append(Sample(tokens, actions, logprobs, rng.standard_normal(LENGTH + 1), lags, ones, index=i))
    return samples


def _flops(model: Any, config: Any, row: Any, samples: list[Sample]) -> float:
    embedding = config.vocab_size * config.hidden_size
    others = sum(p.numel() for p in model.parameters()) - embedding
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    squares = sum(len(sample.context) ** 2 for sample in samples)
    return 6 * others * row.tokens + 6 * embedding * row.scored.numel() + 6 * attention * squares


def _trace(step: Any, path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    path.write_text(averages.table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70))
