"""The policy to train, scored through packed rows: master weights in float32, of all of it or of an adapter alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from sparring.backend.trainer.adapter import StartingPolicy, add_adapter, is_adapted
from sparring.backend.trainer.head import install_head
from sparring.backend.trainer.sharding import shard
from sparring.config import LoraConfig, SamplingConfig
from sparring.errors import ConfigError

__all__ = ["load_policy", "load_reference", "quiet", "refuse_truncated_sampling"]


def load_policy(
    model_path: str | Path, compute_dtype: torch.dtype, lora: LoraConfig | None = None, adapter: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, ready for `model(row=PackedRow)`.

    Args:
        lora: train an adapter alone; the model's own weights are then frozen, in `compute_dtype`.
        adapter: a folder with the adapter to begin with; by default one that changes nothing yet.

    Raises:
        ConfigError: the folder cannot be loaded, or the architecture is not supported.
    """
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(model_path)
            dtype = torch.float32 if lora is None else compute_dtype
            model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load a causal language model from {model_path}: {error}") from error
    if lora is not None:
        add_adapter(model, lora, adapter)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the sampler has none: with it, the ratio would be noise
    install_head(model, compute_dtype)
    return model, tokenizer


def load_reference(
    policy: PreTrainedModel,
    model_path: str | Path,
    compute_dtype: torch.dtype,
    device: torch.device,
    *,
    mesh: DeviceMesh | None = None,
) -> Any:
    """The policy that the run starts from, frozen, for KL terms: a second model, or an adapted policy's own base.

    Args:
        mesh: of the ranks that it is sharded over, if it is.
    """
    if is_adapted(policy):
        return StartingPolicy(policy)
    reference: Any = load_policy(model_path, compute_dtype)[0].requires_grad_(False)
    if mesh is None:
        return reference.to(device)
    shard(reference, mesh, compute_dtype)
    return reference


def refuse_truncated_sampling(sampling: SamplingConfig) -> None:
    """Top-p, top-k and min-p sample from another distribution than the one that is trained.

    Raises:
        ConfigError: one of them is on.
    """
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    set_to = {name: getattr(sampling, name) for name in off}
    on = [f"sampling.{name}={value}" for name, value in set_to.items() if value != off[name]]
    if on:
        raise ConfigError(
            f"{', '.join(on)}: a truncated sampling distribution records log-probabilities that the trainer's full "
            "distribution never has, so every importance ratio would be biased. Leave top_p at 1, top_k at 0 and "
            "min_p at 0, and lower sampling.temperature instead: it divides the logits in the loss too"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers: a live display owns the terminal."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
