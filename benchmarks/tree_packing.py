"""What sharing prefixes saves in training: tree rows against the same sequences one by one, forward and backward.

    python -m benchmarks.tree_packing [--json FILE] [--threads N] [--dtype bfloat16] [--repeats N] [--long]

A group of 8 samples of S own tokens on a shared prompt of P. The bound on saved tokens is 8(P + S)/(P + 8S). The two
programs run the same code on the same samples and alternate, so that both see the same machine; ratios are medians
over pairs. One by one, the weights are also cast to bfloat16 eight times; a row that holds all eight and shares nothing
shows what sharing alone gives.

P = 150, S = 30 on SmolLM2, and beside it TRL's own GRPOTrainer: its loss on its padded batch, its attention, its head.
With --long instead P = 3000 with S = 400 and S = 3000, on the first two layers of SmolLM2, since one by one takes long;
there the time is also compared without the head, whose work sharing cannot save. Attention to the prefix cannot be
shared either: what is left to save of all products, weights' and attention's, is printed beside. Freed memory is kept
(`keep_freed_memory`) in all programs.
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
from benchmarks._trl_grpo import TrlGrpo
from sparring.backend.models import resolve_model
from sparring.backend.objectives import Totals, load_objective
from sparring.backend.trainer.allocator import keep_freed_memory
from sparring.backend.trainer.packing import PackedRow, Sample, pack
from sparring.backend.trainer.policy import load_policy
from sparring.backend.trainer.step import loss_inputs

_GROUP = 8
_SPEEDUP_BOUND = 2.5
_CLIP = 0.2


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


def products(config: Any, prompt: int, own: int) -> float:
    """Multiplications of forward and backward in the layers, one by one over the tree's: what time can follow at best.

    A weight takes three a token; a query-key pair two of a head's size forward and five backward.
    """
    width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    projections = 2 * width * (heads + config.num_key_value_heads * config.head_dim)
    a_token, a_pair = 3 * (projections + 3 * width * config.intermediate_size), 7 * heads
    first = a_token * (prompt + own) + a_pair * (prompt + own) ** 2 / 2
    other = a_token * own + a_pair * (own * prompt + own**2 / 2)
    return _GROUP * first / (first + (_GROUP - 1) * other)


def measure(model: Any, dtype: torch.dtype, prompt: int, own: int, repeats: int, *, quickstart: bool) -> list[Row]:
    samples = make_group(prompt, own, model.config.vocab_size)
    alone, tree, unshared = [pack([s]) for s in samples], [pack(samples)], [pack(samples, share=False)]
    name = f"P={prompt} S={own}: "
    bound = _GROUP * (prompt + own) / (prompt + _GROUP * own)
    saved = sum(row.tokens for row in alone) / tree[0].tokens
    rows: list[Row] = []

    def add(what: str, measured: float, unit: str, bound: float | None = None, *, at_most: bool = False) -> None:
        rows.append(Row(name + what, measured, unit, bound, at_most))
        print(f"{name}{what}: {measured:,.4g} {unit}", flush=True)

    def compare(what: str, other: Callable[[], float], ours: Callable[[], float], bound: float | None = None) -> float:
        slow, fast = paired(other, ours, repeats)
        add(what, statistics.median(a / b for a, b in zip(slow, fast, strict=True)), "x", bound)
        return statistics.median(fast)

    add("tokens, one by one over tree", saved, "x", 0.95 * bound)
    add("products in the layers, one by one over tree", products(model.config, prompt, own), "x")
    compare(
        "time, without the head",
        lambda: without_head(model, alone, dtype),
        lambda: without_head(model, tree, dtype),
        0.8 * bound,
    )
    loss_alone, loss_tree = with_head(model, alone), with_head(model, tree)
    add("loss, relative difference", abs(loss_alone / loss_tree - 1), "", 0.02, at_most=True)
    included = _SPEEDUP_BOUND if quickstart else None
    seconds = compare("time, head included", lambda: with_head(model, alone), lambda: with_head(model, tree), included)
    add("tree, forward and backward", 1e3 * seconds, "ms")
    compare(
        "time, over one row that shares nothing", lambda: with_head(model, unshared), lambda: with_head(model, tree)
    )
    return rows


def against_trl(model: Any, path: Path, dtype: torch.dtype, prompt: int, own: int, repeats: int) -> list[Row]:
    """The whole step of both, packing and DAPO's loss included, on a group that is a little off-policy."""
    rng = np.random.default_rng(0)
    samples = make_group(prompt, own, model.config.vocab_size)
    for sample in samples:
        with torch.no_grad():
            logprobs = model(row=pack([sample])).logprobs
        sample.behaviour_logprobs[sample.action_mask] = logprobs.float().numpy() + 0.1 * rng.normal(size=own)
    objective, trl = load_objective("dapo", {"clip_high": _CLIP}), TrlGrpo(path, dtype, _CLIP)

    def ours() -> float:
        row = pack(samples)
        totals = Totals(tokens=len(row.targets), sequences=len(samples), groups=1)
        loss = objective.loss(loss_inputs(row, model(row=row), totals)).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    difference = abs(trl.step(samples, prompt) / ours() - 1)
    slow, fast = paired(lambda: trl.step(samples, prompt), ours, repeats)
    name = f"P={prompt} S={own}: TRL's GRPOTrainer"
    return [
        Row(f"{name}, a step", 1e3 * statistics.median(slow), "ms"),
        Row(f"{name}, its time over ours", statistics.median(a / b for a, b in zip(slow, fast, strict=True)), "x", 1.0),
        Row(f"{name}, relative difference of the loss", difference, "", 0.02, at_most=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, help="pairs; by default 5, with --long 3")
    parser.add_argument("--long", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    dtype = getattr(torch, arguments.dtype)
    path = resolve_model("smollm2")
    model, _ = load_policy(path, dtype)
    model.train()
    repeats = arguments.repeats or (3 if arguments.long else 5)
    if arguments.long:
        base: Any = model.base_model
        base.layers = base.layers[:2]
        rows = [row for own in (400, 3000) for row in measure(model, dtype, 3000, own, repeats, quickstart=False)]
    else:
        rows = measure(model, dtype, 150, 30, repeats, quickstart=True)
        rows += against_trl(model, path, dtype, 150, 30, repeats)
    layers = "2 layers of SmolLM2" if arguments.long else "SmolLM2"
    title = f"tree packing, groups of {_GROUP}, {layers}, {arguments.dtype}, {arguments.threads} threads"
    return report(title, rows, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
