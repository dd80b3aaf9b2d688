"""Forward and backward on one batch of GSM8K's shape: ours against TRL's AsyncGRPOTrainer, on the same GPU.

Both sides fold the same samples into prefix-tree rows and run on the same random weights with the same attention, one
call of flash attention a layer: TRL's own kernel comes from a hub. TRL's side is its own TreeRow, collator, fused head
and compute_loss. Packing is timed apart, since a trainer may do it beside the GPU's work. "Compiled" has the layers of
both compiled alike, which is an option of our trainer's (`trainer.compile`) and none of TRL's.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from benchmarks._report import Row
from benchmarks.gpu._servers import config_of
from benchmarks.gpu.sharing import GROUP, TEMPERATURE, gsm8k_like
from sparring.backend.objectives import Totals, load_objective
from sparring.backend.trainer.compiled import compile_layers
from sparring.backend.trainer.head import install_head
from sparring.backend.trainer.packing import Sample, pack
from sparring.backend.trainer.step import loss_inputs
from sparring.backend.trainer.varlen_attention import Paths, prefers_varlen, varlen_attention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is experimental
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout
    from trl.experimental.async_grpo.packing import TreeRow
    from trl.trainer.utils import add_fused_lm_head

SHAPE, ROWS, STEPS = "qwen2.5-0.5b", 4, 4
_CLIP = 0.2
_ATTENTION = "trl_tree_varlen"


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    shape, rows, device = SHAPE, ROWS, "cuda"
    batch = [gsm8k_like(seed, config_of(shape).vocab_size) for seed in range(rows)]
    details: dict[str, Any] = {"shape": shape, "rows": rows}
    figures: list[Row] = []
    for compiled in (False, True):
        how = "compiled" if compiled else "as they come"
        speeds: dict[str, dict[str, float]] = {}
        for make in (Ours, Theirs):
            side = make(shape, device, compiled)
            speeds[side.name] = _measure(side, batch, device)
            del side
            if device == "cuda":
                torch.cuda.empty_cache()
        details[how] = speeds
        print(how, speeds, flush=True)
        for name, found in speeds.items():
            figures.append(Row(f"{how}: {name}, forward and backward", found["tokens_per_s"], "tokens/s"))
            figures.append(Row(f"{how}: {name}, with packing", found["with_packing"], "tokens/s"))
        ours, theirs = speeds["ours"], speeds["TRL"]
        figures += _over(f"{how}: ours over TRL", ours, theirs)
        if compiled:
            figures += _over("ours compiled over TRL as it comes", ours, details["as they come"]["TRL"])
        apart = abs(ours["loss"] / theirs["loss"] - 1)
        figures.append(Row(f"{how}: losses differ by", apart, "", 0.02, at_most=True))
    return figures, details


def _over(name: str, ours: dict[str, float], theirs: dict[str, float]) -> list[Row]:
    return [
        Row(name, ours["tokens_per_s"] / theirs["tokens_per_s"], "x", 1.3),
        Row(f"{name}, with packing", ours["with_packing"] / theirs["with_packing"], "x", 1.3),
    ]


class Ours:
    name = "ours"

    def __init__(self, shape: str, device: str, compiled: bool) -> None:
        self._model = _model(shape, device)
        install_head(self._model, torch.bfloat16)
        if compiled:
            compile_layers(self._model)
        self._objective = load_objective("dapo", {"clip_high": _CLIP})
        self._device = device

    def pack(self, samples: list[Sample]) -> Any:
        return pack(samples).to(self._device)

    def step(self, row: Any) -> tuple[float, int]:
        """Loss, and forwarded tokens. The loss is a mean over the row's trained tokens, as TRL's."""
        totals = Totals(tokens=len(row.targets), sequences=len(row.sample_index), groups=1)
        loss = self._objective.loss(loss_inputs(row, self._model(row=row), totals)).loss
        loss.backward()
        self._model.zero_grad(set_to_none=True)
        return float(loss.detach()), row.tokens


class Theirs:
    name = "TRL"

    def __init__(self, shape: str, device: str, compiled: bool) -> None:
        function: Callable[..., Any] = torch.compiler.disable(_attention) if compiled else _attention
        AttentionInterface.register(_ATTENTION, function)
        AttentionMaskInterface.register(_ATTENTION, lambda **_: None)
        self._model = _model(shape, device)
        self._model.set_attn_implementation(_ATTENTION)
        add_fused_lm_head(self._model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
        if compiled:
            for layer in self._model.base_model.layers:
                layer.compile(dynamic=True)
        one = SimpleNamespace(num_processes=1, reduce=lambda t, reduction: t, gather=lambda t: t)
        self._trainer = SimpleNamespace(
            accelerator=one, epsilon_low=_CLIP, epsilon_high=_CLIP, aux_loss_enabled=False,
            current_gradient_accumulation_steps=1, _metrics={"train": defaultdict(list)}, _step_forward_tokens=0.0,
            _step_trained_tokens=0.0, _step_seq_len_weighted=0.0, _step_samples=0.0, _step_forward_s=0.0,
        )  # fmt: skip
        self._collator = DataCollatorForRollout(0)
        self._device = device

    def pack(self, samples: list[Sample]) -> Any:
        row = TreeRow()
        for sample in samples:
            row.add(
                {
                    "input_ids": sample.token_ids,
                    "completion_mask": sample.action_mask.astype(int),
                    "old_log_probs": sample.behaviour_logprobs,
                    "advantage": float(sample.advantages[-1]),
                    "group_id": sample.index // GROUP,
                    "metrics": {},
                }
            )
        return {name: tensor.to(self._device) for name, tensor in self._collator.torch_call([[row]]).items()}

    def step(self, row: Any) -> tuple[float, int]:
        with torch.autocast(self._device, dtype=torch.bfloat16):
            loss = AsyncGRPOTrainer.compute_loss(self._trainer, self._model, row)  # type: ignore[arg-type]
        loss.backward()
        self._model.zero_grad(set_to_none=True)
        return float(loss.detach()), int(row["attention_mask"].sum())


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *,
    tree_kv_index: torch.Tensor, tree_cu_seqlens_q: torch.Tensor, tree_cu_seqlens_k: torch.Tensor,
    tree_max_seqlen_q: int, tree_max_seqlen_k: int, scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """TRL's tree attention by the call that our trainer makes: each segment sees its path."""
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    paths = Paths(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, tree_max_seqlen_q, tree_max_seqlen_k)
    scale = scaling or q.shape[-1] ** -0.5
    if not prefers_varlen(v):
        raise RuntimeError("this comparison needs a GPU in bfloat16")
    return varlen_attention(q, k, v, paths, scale)[None], None


def _model(shape: str, device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32)


def _measure(side: Any, batch: list[list[Sample]], device: str) -> dict[str, float]:
    """Medians over steps, each all rows of the batch; the first two warm up."""

    def synchronise() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    # The advantage is the sample's, not the token's, in TRL: the same for both.
    for samples in batch:
        for sample in samples:
            sample.advantages[:] = sample.advantages[-1]
    began = synchronise()
    packed = [side.pack(samples) for samples in batch]
    packing_s = synchronise() - began
    seconds, loss, tokens = [], 0.0, 0
    for i in range(STEPS + 2):
        began = synchronise()
        done = [side.step(row) for row in packed]
        took = synchronise() - began
        if i >= 2:
            seconds.append(took)
        loss, tokens = sum(each[0] for each in done), sum(each[1] for each in done)
    median = statistics.median(seconds)
    return {
        "tokens_per_s": tokens / median,
        "with_packing": tokens / (median + packing_s),
        "packing_s": packing_s,
        "step_s": median,
        "tokens": tokens,
        "loss": loss,
    }
