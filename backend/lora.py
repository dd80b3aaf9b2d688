"""What a low-rank adapter (LoRA, arXiv:2106.09685) is to the trainer, the engine and the files alike.

Its tensors are called `LAYER.lora_A.weight` (rank, in) and `LAYER.lora_B.weight` (out, rank), as in PEFT's files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparring.config import LoraConfig
from sparring.errors import ConfigError
from sparring.spelling import did_you_mean

__all__ = ["ADAPTER_FILE", "FILE_PREFIX", "adapted_layers", "check_lora", "read_adapter"]

ADAPTER_FILE = "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # of every name in it


def adapted_layers(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Names of the linear layers of a plain model that `lora.target_modules` means, as PEFT reads it: a whole name, or
    the end of one behind a dot; "all-linear" is all but the head.

    Raises:
        ConfigError: a name means no linear layer, or the head, whose log-probabilities are computed in chunks from
            its own weight.
    """
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if lora.target_modules == "all-linear":
        return [name for name, module in linear.items() if module is not head]
    chosen: set[str] = set()
    for target in lora.target_modules:
        found = {name for name in linear if name == target or name.endswith(f".{target}")}
        if any(linear[name] is head for name in found):
            raise ConfigError(
                f"trainer.lora.target_modules names the head, {target!r}: adapters stand beside the layers below it"
            )
        if not found:
            known = sorted({name.rsplit(".", 1)[-1] for name, module in linear.items() if module is not head})
            raise ConfigError(
                f"trainer.lora.target_modules names {target!r}, which no linear layer of a {type(model).__name__} is "
                f"called{did_you_mean(target, known) or '.'} There are {', '.join(known)}"
            )
        chosen |= found
    return [name for name in linear if name in chosen]


def check_lora(folder: Path, lora: LoraConfig) -> None:
    """See that the adapter fits the model in a folder, before its weights are read.

    Raises:
        ConfigError: as `adapted_layers`; or the folder is of no causal language model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot make a causal language model of {folder}: {error}") from error
    adapted_layers(model, lora)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's folder.

    Raises:
        ConfigError: there is no adapter in it.
    """
    try:
        tensors = load_file(folder / ADAPTER_FILE)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder} holds no adapter in PEFT's format: {error}") from error
    return {name.removeprefix(FILE_PREFIX): tensor for name, tensor in tensors.items()}
