"""Training an adapter alone (LoRA, arXiv:2106.09685), by PEFT's layers in the policy itself.

The base is frozen in the compute type, without master weights or optimizer state; the adapter's two small matrices a
layer are float32. On the wire and in files they have PEFT's names: `LAYER.lora_A.weight` and `LAYER.lora_B.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparring.backend.lora import ADAPTER_FILE, FILE_PREFIX, adapted_layers, read_adapter
from sparring.config import LoraConfig
from sparring.errors import ConfigError

__all__ = [
    "StartingPolicy",
    "adapter_dropout",
    "adapter_tensors",
    "add_adapter",
    "is_adapted",
    "load_adapter",
    "merged",
    "save_adapter",
    "served_name",
]

_NAME = "default"  # PEFT's, of the only adapter
_HUB_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")  # in the hub's cache: the id holds elsewhere too


def add_adapter(model: PreTrainedModel, lora: LoraConfig, folder: Path | None = None) -> None:
    """Freeze `model` and put an adapter into it: a new one, which changes nothing yet, or that of a folder.

    Raises:
        ConfigError: the target modules do not fit the model, or the folder's adapter does not fit them.
    """
    layers = adapted_layers(model, lora)
    model.requires_grad_(False)
    config = PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=layers, task_type="CAUSAL_LM"
    )
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    for parameter in adapter_tensors(model).values():
        parameter.data = parameter.data.float()
    if folder is not None:
        load_adapter(model, read_adapter(folder), folder)


def is_adapted(model: nn.Module) -> bool:
    return any(isinstance(module, LoraLayer) for module in model.modules())


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by the names that they have on the wire."""
    return {served_name(name): p for name, p in model.named_parameters() if ".lora_" in name}


def served_name(name: str) -> str:
    """The name on the wire of one of the policy's own `named_parameters()`."""
    return name.replace(f".{_NAME}.", ".")


@torch.no_grad()
def merged(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of the plain model with the adapter's product added, one at a time, under the plain model's names.

    A sum has the wider type of the two: what makes bfloat16 of it rounds once.

    Args:
        named: parameters or state of `model`, the adapter's own among them.
    """
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in named:
        layer, is_base, rest = name.partition(".base_layer.")
        if is_base and rest == "weight":
            tensor = tensor + layers[layer].get_delta_weight(_NAME)
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


def save_adapter(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lora: LoraConfig) -> None:
    """Write the adapter as PEFT does: `PeftModel.from_pretrained(base, folder)` loads it, SGLang and vLLM serve it."""
    tensors = {f"{FILE_PREFIX}{name}": p.detach().cpu().contiguous() for name, p in adapter_tensors(model).items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    targets = lora.target_modules if lora.target_modules == "all-linear" else list(lora.target_modules)
    base = model.name_or_path or ""
    snapshot = _HUB_SNAPSHOT.search(base)
    PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path="/".join(snapshot.groups()) if snapshot else base,
        inference_mode=True,
    ).save_pretrained(str(folder))
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_adapter(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Give the policy's adapter these values.

    Raises:
        ConfigError: they are of another adapter; nothing has changed.
    """
    parameters = adapter_tensors(model)
    theirs, ours = ({name: tuple(t.shape) for name, t in side.items()} for side in (tensors, parameters))
    if theirs != ours:
        odd = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        raise ConfigError(
            f"the adapter in {source} has another rank or other layers than trainer.lora says: {len(odd)} tensors "
            f"differ, such as {odd[0]}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


@contextmanager
def adapter_dropout(model: nn.Module, probability: float) -> Iterator[None]:
    """Dropout before the adapter while supervised; elsewhere there is none, as in the sampler."""
    places = [
        place
        for module in model.modules()
        if isinstance(module, LoraLayer)
        for place in module.lora_dropout.values()
        if isinstance(place, nn.Dropout)  # PEFT puts none where the configuration says 0
    ]
    for place in places:
        place.p = probability
    try:
        yield
    finally:
        for place in places:
            place.p = 0.0


class StartingPolicy:
    """The policy that the run started from, for KL terms: the same base under the adapter's first values.

    Scores as the policy does, `StartingPolicy(model)(row=row)`, without gradient, and takes no second model's memory.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._start = {name: p.detach().clone() for name, p in adapter_tensors(model).items()}

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        parameters = adapter_tensors(self._model)
        now = {name: p.data for name, p in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self._start[name].to(parameter.device)
            return self._model(**inputs)
        finally:
            for name, parameter in parameters.items():
                parameter.data = now[name]
