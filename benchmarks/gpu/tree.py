"""Tree packing on a GPU: first that the kernel attends as the blocks do, then how much of its bound it gains."""

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
from sparring.backend.trainer.attention import TreeLayout, tree_attention
from sparring.backend.trainer.head import install_head
from sparring.backend.trainer.packing import PackedRow, Sample, pack

SHAPE, PROMPT, ANSWER, MEMBERS, GROUPS = "qwen3-0.6b", 1024, 256, 8, 4


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    errors = _kernel_errors()
    if max(errors.values()) > 1e-2:
        raise AssertionError(f"the GPU's attention differs from the blocks': {errors}")
    torch.manual_seed(0)
    config = config_of(SHAPE)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    install_head(model, torch.bfloat16)
    samples = _groups(config.vocab_size)
    tree, flat = (pack(samples, share=share).to("cuda") for share in (True, False))
    seconds = {name: _time(model, row) for name, row in (("tree", tree), ("flat", flat))}
    gained, bound = seconds["flat"] / seconds["tree"], _work(config, flat, samples) / _work(config, tree, samples)
    details = {
        "shape": SHAPE,
        "prompt": PROMPT,
        "answer": ANSWER,
        "members": MEMBERS,
        "groups": GROUPS,
        "tokens": {"tree": tree.tokens, "flat": flat.tokens},
        "seconds": seconds,
        "kernel_errors": errors,
    }
    rows = [
        Row("tree packing: faster than end to end", gained, "x", 0.8 * bound),
        Row("its bound, by matrix work (head included)", bound, "x"),
        Row("kernel against blocks, worst relative error", max(errors.values()), "", 1e-2, at_most=True),
    ]
    return rows, details


def _work(config: Any, row: PackedRow, samples: list[Sample]) -> float:
    """Forward FLOPs of the products; attention reads each query's whole path, shared or not."""
    projections = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    per_layer = config.hidden_size * (projections + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size * row.scored.numel()
    novel = ANSWER if row.tokens < row.unpacked_tokens else PROMPT + ANSWER
    pairs = sum(novel * (len(sample.context) - novel / 2) for sample in samples)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 2 * (config.num_hidden_layers * per_layer * row.tokens + head + attention)


def _groups(vocabulary: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(GROUPS):
        prompt = rng.integers(0, vocabulary, PROMPT)
        for _ in range(MEMBERS):
            tokens = np.concatenate([prompt, rng.integers(0, vocabulary, ANSWER)])
            size = len(tokens)
            samples.append(
                Sample(
                    tokens,
                    np.arange(size) >= PROMPT,
                    np.zeros(size, np.float32),
                    np.ones(size),
                    np.zeros(size, np.int32),
                    np.ones(size, np.float32),
                    index=len(samples),
                )
            )
    return samples


def _time(model: Any, row: PackedRow) -> float:
    seconds = []
    for i in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model(row=row).logprobs.sum().backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if i >= 2:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _kernel_errors() -> dict[str, float]:
    """Outputs and gradients of the GPU's one call, in bfloat16, against SDPA over blocks in float32."""
    rng = np.random.default_rng(1)
    paths: list[Any] = []
    chunks, total = [], 0
    for i in range(9):
        shared = int(rng.integers(0, len(paths[-1]) + 1)) if i else 0
        novel = int(rng.integers(1, 90))
        prefix = paths[-1][:shared] if i else np.empty(0, np.int64)
        paths.append(np.concatenate([prefix, np.arange(total, total + novel)]))
        chunks.append(novel)
        total += novel
    layout = TreeLayout(paths, chunks)
    torch.manual_seed(0)
    reference = [torch.randn(1, heads, total, 64, requires_grad=True) for heads in (4, 2, 2)]
    expected, _ = tree_attention(torch.nn.Module(), *reference, None, tree=layout)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), reference)
    ours = [x.detach().cuda().bfloat16().requires_grad_() for x in reference]
    there = layout.to("cuda")
    got, _ = tree_attention(torch.nn.Module(), *ours, None, tree=there, paths=there.paths)
    gradients = torch.autograd.grad((got * weights.cuda()).sum(), ours)
    pairs = zip(("out", "dq", "dk", "dv"), (got, *gradients), (expected, *wanted), strict=True)
    return {name: float((a.detach().float().cpu() - b.detach()).norm() / b.detach().norm()) for name, a, b in pairs}
