"""Checkpoints: a Hugging Face folder, or an adapter's, plus what training needs to go on, in one atomic step.

A checkpoint is written aside, flushed to disk and renamed, so a folder named `checkpoint-N` is whole or absent.
`manifest.json` holds each file's size and CRC, which loading verifies before any weight changes. Tensors are
safetensors, all else JSON: nothing is unpickled.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sparring.backend.folders import written_aside
from sparring.backend.lora import read_adapter
from sparring.backend.trainer.adapter import adapter_tensors, is_adapted, merged, save_adapter
from sparring.backend.trainer.policy import quiet
from sparring.backend.trainer.sharding import part_of, whole, whole_state
from sparring.config import LoraConfig
from sparring.errors import ConfigError, TrainerError

__all__ = [
    "KeptCheckpoints",
    "checkpoint_step",
    "latest_checkpoint",
    "lend_shards",
    "load_checkpoint",
    "save_checkpoint",
    "save_model",
]

_NAME = re.compile(r"checkpoint-(\d+)")
_FORMAT = 1
_INSTEAD = "remove it to resume from the one before"


def checkpoint_step(folder: Path) -> int:
    """Optimizer steps done at the checkpoint."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise TrainerError(f"{folder} is not named checkpoint-N")
    return int(match[1])


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    return next(reversed(_checkpoints(run_dir)), None)


def _checkpoints(run_dir: Path) -> list[Path]:
    """The oldest first."""
    return sorted((f for f in run_dir.glob("checkpoint-*") if _NAME.fullmatch(f.name)), key=checkpoint_step)


def save_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None = None
) -> None:
    """Write model and tokenizer as a Hugging Face folder that transformers, SGLang and vLLM load as it is.

    An adapter is merged into the weights; in bfloat16 the sum is rounded, as it is not where the run samples.

    Args:
        dtype: of the weights in the folder; by default those that they have.
    """
    state = merged(model, whole_state(model))
    written = {name: t.detach().to(dtype or t.dtype) if t.is_floating_point() else t for name, t in state}
    config = copy.deepcopy(model.config)
    with torch.device("meta"):  # what says how to write them: without an adapter, and of the type that they have
        plain = type(model)(config).to(dtype=dtype or model.dtype)  # type: ignore[call-arg]  # as in the engine
    plain.generation_config = model.generation_config
    with quiet():
        plain.save_pretrained(folder, state_dict=written)
    tokenizer.save_pretrained(folder)


def lend_shards(model: PreTrainedModel, optimizer: torch.optim.Optimizer | None = None) -> None:
    """What the other ranks do while the main one saves: take part in gathering what is sharded, and keep nothing.

    Args:
        optimizer: where a checkpoint is saved; without it, a model.
    """
    for _ in whole_state(model):
        pass
    if optimizer is not None:
        for _ in _whole_moments(optimizer, dict(model.named_parameters())):
            pass


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    *,
    lora: LoraConfig | None = None,
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write `run_dir/checkpoint-{step}` atomically.

    Args:
        lora: of the adapter that is trained alone: the checkpoint is then the adapter's folder in PEFT's format.
        also: writes more files into the folder before it is sealed.

    Raises:
        TrainerError: the disk is full, or the folder cannot be written. Earlier checkpoints are untouched.
    """
    final = run_dir / f"checkpoint-{step}"
    try:
        with written_aside(final) as partial:
            if lora is None:
                save_model(partial, model, tokenizer)
            else:
                save_adapter(partial, model, tokenizer, lora)
            tensors, scalars = _flatten_optimizer(optimizer, dict(model.named_parameters()))
            save_file(tensors, partial / "optimizer.safetensors")
            save_file(_torch_rng(), partial / "rng.safetensors")
            if also is not None:
                also(partial)
            document = {
                "format": _FORMAT,
                "step": step,
                "parameters": _signature(model),
                "optimizer": scalars,
                "scheduler": {k: v for k, v in scheduler.state_dict().items() if isinstance(v, int | float | list)},
                "rng": _python_rng(),
            }
            (partial / "trainer.json").write_text(json.dumps(document))
            manifest = {f.name: [f.stat().st_size, _crc(f)] for f in sorted(partial.iterdir())}
            (partial / "manifest.json").write_text(json.dumps(manifest))
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"cannot write checkpoint {final}: {error}. Earlier checkpoints are intact") from error
    return final


class KeptCheckpoints:
    """Which checkpoints of a run stay: the newest few, and those whose evaluations were best.

    While an evaluation is under way, training goes on and writes more: the checkpoint of its step stays until then.
    """

    def __init__(self, run_dir: Path, *, newest: int, best: int) -> None:
        self._run_dir, self._newest, self._best = run_dir, newest, best
        self._awaited: set[int] = set()

    def await_evaluation(self, step: int) -> bool:
        """The weights of `step` will be evaluated now. Whether they need a checkpoint for it."""
        if self._best:
            self._awaited.add(step)
        return bool(self._best)

    def evaluated(self, step: int, rewards: Mapping[int, float]) -> None:
        self._awaited.discard(step)
        self.prune(rewards)

    def prune(self, rewards: Mapping[int, float]) -> None:
        """Remove all others.

        Args:
            rewards: held-out reward by the step that was evaluated; of equal ones the earlier is the better.
        """
        ranked = sorted((step for step in rewards if step > 0), key=lambda step: (-rewards[step], step))
        spared = self._awaited.union(ranked[: self._best])
        for folder in _checkpoints(self._run_dir)[: -self._newest]:
            if checkpoint_step(folder) not in spared:
                shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
) -> None:
    """Restore model (or its adapter), optimizer, scheduler and generators exactly.

    The rate is that of the schedule as it is now: a run that goes on for more steps than it was begun with would first
    train at the rate of its former end, which may be none.

    Raises:
        TrainerError: the checkpoint is cut off, damaged, or of another model; nothing has changed then.
    """
    document = _verify(folder)
    theirs, ours = document["parameters"], _signature(model)
    if theirs != ours:
        odd = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        raise TrainerError(f"checkpoint {folder} is of another model: {len(odd)} parameters differ, such as {odd[0]}")
    adapted = is_adapted(model)
    try:
        weights: Any = read_adapter(folder) if adapted else _read_model(folder, model.dtype)
        state = load_file(folder / "optimizer.safetensors")
        generators = load_file(folder / "rng.safetensors")
    except (OSError, SafetensorError, ConfigError) as error:
        raise TrainerError(f"checkpoint {folder} cannot be read: {error}") from error
    targets = adapter_tensors(model) if adapted else dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in weights.items():
            targets[name].copy_(part_of(value, targets[name]))
    _restore_optimizer(optimizer, dict(model.named_parameters()), state, document["optimizer"])
    scheduler.load_state_dict({**scheduler.state_dict(), **document["scheduler"]})
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    scheduler._last_lr = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate
    _restore_rng(generators, document["rng"])


def _read_model(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """By transformers, which knows how the files' names and shards make the model's parameters."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _verify(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, (size, crc) in manifest.items():
            file = folder / name
            if file.stat().st_size != size or _crc(file) != crc:
                raise TrainerError(f"checkpoint {folder} is damaged: {name} is not as it was written; {_INSTEAD}")
        document = json.loads((folder / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise TrainerError(f"checkpoint {folder} is incomplete or not one of ours: {error}; {_INSTEAD}") from error
    if document.get("format") != _FORMAT:
        raise TrainerError(f"checkpoint {folder} has format {document.get('format')}, this version reads {_FORMAT}")
    return document


def _signature(model: PreTrainedModel) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in model.named_parameters()}


def _flatten_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, numbers, seen = {}, {}, set()
    for name, value in _whole_moments(optimizer, parameters):
        if isinstance(value, Tensor):
            shared = value.data_ptr() in seen  # the 8-bit optimizer's code book; safetensors takes no alias
            seen.add(value.data_ptr())
            tensors[name] = (value.clone() if shared else value).cpu().contiguous()
        else:
            numbers[name] = value
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return tensors, {"groups": groups, "numbers": numbers}


def _whole_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> Iterator[tuple[str, Any]]:
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}/{key}", whole(value) if isinstance(value, Tensor) else value


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    optimizer.state.clear()
    for key, value in [*tensors.items(), *scalars["numbers"].items()]:
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        if isinstance(value, Tensor) and field != "step":
            value = part_of(value, parameter)
        optimizer.state[parameter][field] = value
    for group, saved in zip(optimizer.param_groups, scalars["groups"], strict=True):
        group.update({k: tuple(v) if k == "betas" else v for k, v in saved.items()})


def _torch_rng() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _python_rng() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def _restore_rng(states: Mapping[str, Tensor], python: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and f"cuda{torch.cuda.device_count() - 1}" in states:
        torch.cuda.set_rng_state_all([states[f"cuda{i}"] for i in range(torch.cuda.device_count())])
    version, keys, gauss = python["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numpy_keys, *rest = python["numpy"]
    np.random.set_state((kind, np.array(numpy_keys, np.uint32), *rest))


def _crc(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
