"""What sharing prefixes saves in training: tree rows against the same sequences one by one, forward and backward.

    python -m benchmarks.tree_packing [--json FILE] [--threads N] [--dtype bfloat16] [--repeats N] [--long]

A group of 8 samples of S own tokens on a shared prompt of P. The bound on saved tokens is 8(P + S)/(P + 8S). The two
programs run the same code on the same samples and alternate, so that both see the same machine; ratios are medians
over pairs. One by one, the weights are also cast to bfloat16 eight times; a row that holds all eight and shares nothing
shows what sharing alone gives. SmolLM2 for P = 150, S = 30. With --long also P = 3000 with S = 400 and S = 3000, on
the first two layers of
SmolLM2, since one by one takes long; there the time is also compared without the head, whose work sharing cannot save.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._report import Row, report
from sparring.backend.models import resolve_model
from sparring.backend.trainer.packing import PackedRow, Sample, pack
from sparring.backend.trainer.policy import load_policy

_GROUP = 8
_SPEEDUP_BOUND = 2.5


def make_group(prompt: int, own: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Samples that share their prompt and, being random, hardly anything else."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocabulary, prompt)
    n = prompt + own
    return [
        Sample(
            token_ids=np.concatenate([shared, rng.integers(0, vocabulary, own)]),
            action_mask=np.arange(n) >= prompt,
            behaviour_logprobs=np.full(n, -8.0, np.float32),
            advantages=np.full(n, rng.normal()),
            lags=np.zeros(n, np.int32),
            temperatures=np.ones(n, np.float32),
            index=i,
        )
        for i in range(_GROUP)
    ]


def with_head(model: Any, rows: Sequence[PackedRow]) -> float:
    """Forward and backward of the policy gradient; the loss."""
    terms = sum(len(row.targets) for row in rows)
    total = 0.0
    for row in rows:
        loss = -(model(row=row).logprobs * row.advantages).sum() / terms
        loss.backward()
        total += float(loss.detach())
    model.zero_grad(set_to_none=True)
    return total


def without_head(model: Any, rows: Sequence[PackedRow], dtype: torch.dtype) -> float:
    """Forward and backward of the layers alone, from the states that would be scored."""
    for row in rows:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
            hidden = model.base_model(
                input_ids=row.input_ids[None], position_ids=row.position_ids[None], use_cache=False, tree=row.layout
            ).last_hidden_state[0]
        hidden[row.scored].float().square().mean().backward()
    model.zero_grad(set_to_none=True)
    return 0.0


def paired(one: Callable[[], float], other: Callable[[], float], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of both, alternating, after one run of each to warm up."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for program, seconds in zip((one, other), times, strict=True):
            began = time.perf_counter()
            program()
            if repeat:
                seconds.append(time.perf_counter() - began)
    return times


def measure(model: Any, dtype: torch.dtype, prompt: int, own: int, repeats: int, *, quickstart: bool) -> list[Row]:
    samples = make_group(prompt, own, model.config.vocab_size)
    alone, tree = [pack([s]) for s in samples], [pack(samples)]
    name = f"P={prompt} S={own}: "
    bound = _GROUP * (prompt + own) / (prompt + _GROUP * own)
    saved = sum(row.tokens for row in alone) / tree[0].tokens
    rows = [Row(name + "tokens, one by one over tree", saved, "x", 0.95 * bound)]
    loss_alone, loss_tree = with_head(model, alone), with_head(model, tree)
    rows.append(Row(name + "loss, relative difference", abs(loss_alone / loss_tree - 1), "", 0.02, at_most=True))
    slow, fast = paired(lambda: with_head(model, alone), lambda: with_head(model, tree), repeats)
    ratio = statistics.median(a / b for a, b in zip(slow, fast, strict=True))
    rows.append(Row(name + "tree, forward and backward", 1e3 * statistics.median(fast), "ms"))
    rows.append(Row(name + "time, head included", ratio, "x", _SPEEDUP_BOUND if quickstart else None))
    unshared = [pack(samples, share=False)]
    slow, fast = paired(lambda: with_head(model, unshared), lambda: with_head(model, tree), repeats)
    ratio = statistics.median(a / b for a, b in zip(slow, fast, strict=True))
    rows.append(Row(name + "time, over one row that shares nothing", ratio, "x"))
    slow, fast = paired(
        lambda: without_head(model, alone, dtype), lambda: without_head(model, tree, dtype), repeats
    )
    ratio = statistics.median(a / b for a, b in zip(slow, fast, strict=True))
    rows.append(Row(name + "time, without the head", ratio, "x", 0.8 * bound))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--long", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    model, _ = load_policy(resolve_model("smollm2"), dtype)
    model.train()
    rows = measure(model, dtype, 150, 30, arguments.repeats, quickstart=True)
    if arguments.long:
        base: Any = model.base_model
        base.layers = base.layers[:2]
        for own in (400, 3000):
            print(f"P = 3000, S = {own}: minutes on a CPU", flush=True)
            rows += measure(model, dtype, 3000, own, max(1, arguments.repeats // 3), quickstart=False)
    title = f"tree packing, groups of {_GROUP}, SmolLM2, {arguments.dtype}, {arguments.threads} threads"
    return report(title, rows, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
