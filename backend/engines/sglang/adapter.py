"""Brings one SGLang server the versions of an adapter (LoRA), unmerged, beside the model that it holds.

Each version is loaded under a name of its own while requests run, and a request names the one that it is sampled with.
So nothing is copied in the pause; but SGLang lets no request change its adapter, so requests end there and go on under
the next name from what they said, at the price of reading their prompts again.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparring.backend.engines.base import WeightSource
from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.transport import Transport
from sparring.backend.engines.sglang.verify import STACKED
from sparring.backend.lora import ADAPTER_FILE, FILE_PREFIX, read_adapter
from sparring.config import LoraConfig
from sparring.errors import ConfigError, EngineError

__all__ = ["AdapterLoader", "StagedAdapter", "served_modules"]

_A, _B = ".lora_A.weight", ".lora_B.weight"
_UNLOAD_S = 30.0


@dataclass(eq=False)
class StagedAdapter:
    """One version, loaded by the server; no request has named it yet."""

    version: int
    name: str
    loaded: bool = False


class AdapterLoader:
    """See the module.

    Attributes:
        current: the name of the adapter that requests are sampled with; None: the model alone, before the first.
    """

    def __init__(
        self, transport: Transport, layout: WeightLayout, lora: LoraConfig, *, salt: str, deadline_s: float
    ) -> None:
        """
        Args:
            salt: tells our adapters from those of other clients of the server.
        """
        self._transport, self._layout, self._lora, self._salt = transport, layout, lora, salt
        self._deadline_s = deadline_s
        self._loaded: set[str] = set()
        self.current: str | None = None

    async def stage(self, version: int, source: WeightSource) -> StagedAdapter:
        """Have the server load the tensors of an adapter, or its PEFT folder, under a new name.

        Raises:
            EngineError: they are no adapter of this model, or the server refused them.
        """
        try:
            tensors = read_adapter(source) if isinstance(source, Path) else dict(source)
        except ConfigError as error:
            raise EngineError(str(error)) from error
        layers = self._check(tensors)
        name = f"sparring-{self._salt}-{version}"
        if name in self._loaded:
            await self._unload(name)  # staged before and never used, or its answer was lost
        self._loaded.add(name)
        with tempfile.TemporaryDirectory(prefix=f"sparring-adapter-{version}-") as folder:
            await asyncio.to_thread(self._write, Path(folder), tensors, layers)
            body = {"lora_name": name, "lora_path": folder}
            answer = await self._transport.post("/load_lora_adapter", body, deadline_s=self._deadline_s)
        if not isinstance(answer, Mapping) or not answer.get("success"):
            said = answer.get("error_message", answer) if isinstance(answer, Mapping) else answer
            raise EngineError(
                f"the SGLang server at {self._transport.url} did not load the adapter of version {version}: "
                f"{str(said)[:500]}; it needs --enable-lora, --max-lora-rank and --lora-target-modules"
            )
        return StagedAdapter(version, name)

    async def load(self, staged: StagedAdapter) -> None:
        """From now on requests name this version. Those that named another must have ended."""
        self.current, staged.loaded = staged.name, True

    async def verify(self) -> None:
        """Have the server forget the versions that no request names any more."""
        for name in self._loaded - {self.current}:
            await self._unload(name)

    async def held(self, version: int, *, deadline_s: float) -> str:
        """`version` as the server calls it, if it still has the adapter of it: one that was restarted has none."""
        if self.current is None:
            return str(version)
        models = await self._transport.get("/v1/models", deadline_s=deadline_s)
        return str(version) if self.current in {model.get("id") for model in models.get("data") or ()} else "no adapter"

    async def close(self) -> None:
        self.current = None
        await self.verify()

    async def _unload(self, name: str) -> None:
        self._loaded.discard(name)
        with suppress(EngineError):  # it costs memory alone, and a server that was restarted knows nothing of it
            await self._transport.post("/unload_lora_adapter", {"lora_name": name}, deadline_s=_UNLOAD_S)

    def _check(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The layers that the adapter stands beside.

        Raises:
            EngineError: its shapes are not those of such an adapter.
        """
        layers = sorted({name.removesuffix(_A).removesuffix(_B) for name in tensors})
        for layer in layers:
            base = self._layout.shapes.get(f"{layer}.weight")
            expected = base and ((self._lora.rank, base[1]), (base[0], self._lora.rank))
            found = tuple(tuple(tensors[layer + end].shape) if layer + end in tensors else None for end in (_A, _B))
            if found != expected:
                raise EngineError(
                    f"the new weights are no adapter of rank {self._lora.rank} for {self._layout.folder}: {layer} has "
                    f"matrices of shapes {found[0]} and {found[1]} beside a weight of shape {base}"
                )
        if not layers:
            raise EngineError("the new weights hold no tensor at all")
        return layers

    def _write(self, folder: Path, tensors: Mapping[str, Tensor], layers: list[str]) -> None:
        """As PEFT does. Targets are the last parts of the layers' names: SGLang knows no others."""
        kind = getattr(torch, self._layout.dtype)
        written = {f"{FILE_PREFIX}{name}": t.detach().to("cpu", kind).contiguous() for name, t in tensors.items()}
        layers = sorted({partner for layer in layers for partner in self._partners(layer)})
        for layer in layers:
            if layer + _A not in tensors:
                outputs, inputs = self._layout.shapes[f"{layer}.weight"]
                written[f"{FILE_PREFIX}{layer}{_A}"] = torch.zeros(self._lora.rank, inputs, dtype=kind)
                written[f"{FILE_PREFIX}{layer}{_B}"] = torch.zeros(outputs, self._lora.rank, dtype=kind)
        save_file(written, folder / ADAPTER_FILE, metadata={"format": "pt"})
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._layout.folder),
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def _partners(self, layer: str) -> list[str]:
        """This layer and those that SGLang computes with it: an adapter must have them all, or is misread."""
        parent, _, last = layer.rpartition(".")
        together = [name for name, stack in STACKED.items() if stack == STACKED.get(last)] or [last]
        return [f"{parent}.{name}" for name in together if f"{parent}.{name}.weight" in self._layout.shapes]


def served_modules(layout: WeightLayout, lora: LoraConfig) -> list[str]:
    """The names by which SGLang knows the layers that an adapter stands beside: the last part of each."""
    if lora.target_modules != "all-linear":
        return sorted({target.rpartition(".")[2] for target in lora.target_modules})
    matrices = (name.removesuffix(".weight") for name, shape in layout.shapes.items() if len(shape) == 2)
    return sorted({name.rpartition(".")[2] for name in matrices} - {"embed_tokens", "lm_head"})
