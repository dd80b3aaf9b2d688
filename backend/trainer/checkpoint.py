"""Checkpoints: a Hugging Face folder plus what training needs to go on, written in one atomic step.

A checkpoint is written into a hidden folder, flushed to disk and renamed, so a folder named `checkpoint-N` is whole or
absent. `manifest.json` holds each file's size and CRC, which loading verifies before any weight changes. Tensors are
safetensors, all else JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparring.backend.trainer.policy import quiet
from sparring.errors import TrainerError

__all__ = ["checkpoint_step", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "save_model"]

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
    folders = [f for f in run_dir.glob("checkpoint-*") if _NAME.fullmatch(f.name)]
    return max(folders, key=checkpoint_step, default=None)


def save_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None = None
) -> None:
    """Write model and tokenizer as a Hugging Face folder that transformers, SGLang and vLLM load as it is."""
    state = {name: t.detach() for name, t in model.state_dict().items()}
    if dtype is not None:
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    before = model.config.dtype
    model.config.dtype = dtype or before
    try:
        with quiet():
            model.save_pretrained(folder, state_dict=state)
    finally:
        model.config.dtype = before
    tokenizer.save_pretrained(folder)


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    *,
    keep: int,
    extra: Mapping[str, Any] | None = None,
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write `run_dir/checkpoint-{step}` atomically, then remove all but the newest `keep`.

    Args:
        also: writes more files into the folder before it is sealed.
        extra: JSON-able state of others (sampler and buffer position), returned by `load_checkpoint`.

    Raises:
        TrainerError: the disk is full, or the folder cannot be written. Earlier checkpoints are untouched.
    """
    final, partial = run_dir / f"checkpoint-{step}", run_dir / f".checkpoint-{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_model(partial, model, tokenizer)
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
            "extra": dict(extra or {}),
        }
        (partial / "trainer.json").write_text(json.dumps(document))
        manifest = {f.name: [f.stat().st_size, _crc(f)] for f in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(manifest))
        for file in partial.iterdir():
            _flush(file)
        _flush(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _flush(run_dir)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainerError(f"cannot write checkpoint {final}: {error}. Earlier checkpoints are intact") from error
    older = sorted((f for f in run_dir.glob("checkpoint-*") if _NAME.fullmatch(f.name)), key=checkpoint_step)[:-keep]
    for folder in older:
        shutil.rmtree(folder, ignore_errors=True)
    return final


def load_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> dict[str, Any]:
    """Restore model, optimizer, scheduler and generators exactly.

    Returns:
        `extra` as it was saved.

    Raises:
        TrainerError: the checkpoint is cut off, damaged, or of another model; nothing has changed then.
    """
    document = _verify(folder)
    theirs, ours = document["parameters"], _signature(model)
    if theirs != ours:
        odd = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        raise TrainerError(f"checkpoint {folder} is of another model: {len(odd)} parameters differ, such as {odd[0]}")
    try:
        weights = load_file(folder / "model.safetensors")
        state = load_file(folder / "optimizer.safetensors")
        generators = load_file(folder / "rng.safetensors")
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"checkpoint {folder} cannot be read: {error}") from error
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in weights.items():
            target = parameters.get(name, buffers.get(name))
            if target is not None:
                target.copy_(value)
    _restore_optimizer(optimizer, parameters, state, document["optimizer"])
    scheduler.load_state_dict({**scheduler.state_dict(), **document["scheduler"]})
    _restore_rng(generators, document["rng"])
    return document["extra"]


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
    tensors, numbers = {}, {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value.detach().cpu().contiguous()
            else:
                numbers[f"{name}/{key}"] = value
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return tensors, {"groups": groups, "numbers": numbers}


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
            value = value.to(parameter.device)
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


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
