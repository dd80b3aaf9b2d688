"""One training step on one batch, ours against TRL's AsyncGRPOTrainer, and the head's memory on a large vocabulary.

    python -m benchmarks.trainer_step [--json FILE] [--threads N] [--dtype bfloat16] [--repeats N]

The batch is the quickstart's shape: 4 groups of 8 samples, one system prompt for all, 45 sampled tokens in two turns
around a tool result, samples of a group agreeing on their first tokens. Both sides pack it into prefix-tree rows and
run forward and backward on SmolLM2, alternating; packing counts. TRL's side is its own TreeRow, collator, fused head
and compute_loss; its attention kernel needs a GPU, so it gets one SDPA call with the dense mask of its tree instead.

The head's memory: peak of forward and backward over 500 positions and 150,000 words in processes of their own,
against hidden states, weight, its gradient and one chunk of logits.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from benchmarks._report import Row, report
from sparring.backend.models import resolve_model
from sparring.backend.objectives import Totals, load_objective
from sparring.backend.trainer.head import _CHUNK_ELEMENTS, chunked_logprobs
from sparring.backend.trainer.packing import Sample, pack
from sparring.backend.trainer.policy import load_policy
from sparring.backend.trainer.step import loss_inputs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout
    from trl.experimental.async_grpo.packing import TreeRow
    from trl.trainer.utils import add_fused_lm_head

_TEMPERATURE = 0.7
_POSITIONS, _VOCABULARY, _WIDTH = 500, 150_000, 512


def make_batch(vocabulary: int, seed: int = 0) -> list[Sample]:
    """32 samples as the quickstart has them in the middle of its training."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, vocabulary, 130)
    samples = []
    for _ in range(4):
        prompt = np.concatenate([system, rng.integers(0, vocabulary, 60)])
        first = rng.integers(0, vocabulary, 30)
        tool = rng.integers(0, vocabulary, 15)
        for _ in range(8):
            call = np.concatenate([first[: rng.integers(5, 30)], rng.integers(0, vocabulary, 30)])[:30]
            ids = np.concatenate([prompt, call, tool, rng.integers(0, vocabulary, 15)])
            n, p = len(ids), len(prompt)
            mask = np.zeros(n, bool)
            mask[p : p + 30] = mask[p + 45 :] = True
            samples.append(
                Sample(
                    token_ids=ids,
                    action_mask=mask,
                    behaviour_logprobs=np.where(mask, -10.0, 0.0).astype(np.float32),
                    advantages=np.full(n, rng.normal()),
                    lags=np.zeros(n, np.int32),
                    temperatures=np.full(n, _TEMPERATURE, np.float32),
                    index=len(samples),
                )
            )
    return samples


class Ours:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.model: Any = load_policy(path, dtype)[0]
        self.objective = load_objective("dapo", {"clip_high": 0.2})

    def step(self, samples: list[Sample]) -> float:
        row = pack(samples)
        totals = Totals(tokens=len(row.targets), sequences=len(samples), groups=4)
        loss = self.objective.loss(loss_inputs(row, self.model(row=row), totals)).loss
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach())


class Theirs:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        AttentionInterface.register("trl_tree_dense", dense_tree_attention)
        AttentionMaskInterface.register("trl_tree_dense", lambda **_: None)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.set_attn_implementation("trl_tree_dense")
        add_fused_lm_head(self.model, temperature=_TEMPERATURE, outputs=("log_probs", "entropy"))
        self.dtype = dtype
        one = SimpleNamespace(num_processes=1, reduce=lambda t, reduction: t, gather=lambda t: t)
        self.trainer = SimpleNamespace(
            accelerator=one, epsilon_low=0.2, epsilon_high=0.2, aux_loss_enabled=False,
            current_gradient_accumulation_steps=1, _metrics={"train": defaultdict(list)}, _step_forward_tokens=0.0,
            _step_trained_tokens=0.0, _step_seq_len_weighted=0.0, _step_samples=0.0, _step_forward_s=0.0,
        )  # fmt: skip
        self.collator = DataCollatorForRollout(0)

    def step(self, samples: list[Sample]) -> float:
        row = TreeRow()
        for sample in samples:
            row.add(
                {
                    "input_ids": sample.token_ids,
                    "completion_mask": sample.action_mask.astype(int),
                    "old_log_probs": sample.behaviour_logprobs,
                    "advantage": float(sample.advantages[0]),
                    "group_id": sample.index // 8,
                    "metrics": {},
                }
            )
        inputs = self.collator.torch_call([[row]])
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is torch.bfloat16):
            loss = AsyncGRPOTrainer.compute_loss(self.trainer, self.model, inputs)  # type: ignore[arg-type]
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach())


_masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def dense_tree_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *,
    tree_kv_index: torch.Tensor, tree_cu_seqlens_q: torch.Tensor, tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """TRL's tree attention as one SDPA call: each segment sees its path, the last of it causally."""
    if id(tree_kv_index) not in _masks:
        n = query.shape[2]
        mask = torch.zeros(n, n, dtype=torch.bool)
        q, k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
        for s in range(len(q) - 1):
            path, length = tree_kv_index[k[s] : k[s + 1]], q[s + 1] - q[s]
            mask[q[s] : q[s + 1], path[: len(path) - length]] = True
            mask[q[s] : q[s + 1], q[s] : q[s + 1]] = torch.ones(length, length, dtype=torch.bool).tril()
        _masks.clear()
        _masks[id(tree_kv_index)] = (tree_kv_index, mask[None, None])
    mask = _masks[id(tree_kv_index)][1]
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.size(1) != key.size(1)
    )
    return out.transpose(1, 2).contiguous(), None


def head_peak_bytes(positions: int) -> float:
    """How much a forward and backward of the head raises the peak of a fresh process over its inputs."""
    code = f"import benchmarks.trainer_step as b; b.print_head_peak({positions})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return float(out.stdout.split()[-1])


def print_head_peak(positions: int) -> None:
    torch.set_num_threads(1)
    hidden = torch.randn(positions, _WIDTH, requires_grad=True)
    weight = torch.nn.Parameter(0.02 * torch.randn(_VOCABULARY, _WIDTH))
    index = torch.arange(positions)
    small = torch.nn.Parameter(weight[:1000].detach().clone())  # load what a first call loads
    chunked_logprobs(hidden, small, None, torch.ones(positions), index, index, torch.float32)[0].sum().backward()
    hidden.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    chunked_logprobs(hidden, weight, None, torch.ones(positions), index, index, torch.float32)[0].sum().backward()
    print(_status("VmHWM") - before)


def _status(field: str) -> int:
    """Bytes, of this process (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path, dtype = resolve_model("smollm2"), getattr(torch, arguments.dtype)
    ours, theirs = Ours(path, dtype), Theirs(path, dtype)
    samples = make_batch(ours.model.config.vocab_size)
    difference = abs(ours.step(copy.copy(samples)) / theirs.step(samples) - 1)
    times: dict[str, list[float]] = {"ours": [], "trl": []}
    for _ in range(arguments.repeats):
        for name, side in (("ours", ours), ("trl", theirs)):
            began = time.perf_counter()
            side.step(samples)
            times[name].append(time.perf_counter() - began)
    ratio = statistics.median(t / o for o, t in zip(times["ours"], times["trl"], strict=True))
    head_peak, chunk = head_peak_bytes(_POSITIONS), 4 * _CHUNK_ELEMENTS
    floor = 4 * _WIDTH * (2 * _POSITIONS + _VOCABULARY)  # states and their gradient, the weight's gradient
    rows = [
        Row("step, ours", statistics.median(times["ours"]), "s"),
        Row("step, TRL's code", statistics.median(times["trl"]), "s"),
        Row("TRL's over ours", ratio, "x", 1.0),
        Row("loss, relative difference", difference, "", 0.02, at_most=True),
        Row("head's peak over states, gradients and a chunk", head_peak / (floor + chunk), "x", 1.2, at_most=True),
    ]
    title = f"a training step on 4 groups of 8, SmolLM2, {arguments.dtype}, {arguments.threads} threads"
    return report(title, rows, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
