"""How the embedded engine decodes, wherever it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sparring.config import LoraConfig

__all__ = ["EngineOptions"]


@dataclass(frozen=True)
class EngineOptions:
    """`TorchEngine` and `ProcessEngine` take these as keyword arguments.

    Attributes:
        slots: most requests that decode together.
        max_length: context length in tokens, prompt and completion together.
        dtype: of weights, keys and logits: "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", or "auto": a GPU where there is one.
        threads: torch threads, for the whole process that decodes.
        deterministic: a request's tokens and log-probabilities then depend on the weights, its prompt and its sampling
            alone, bit for bit: not on other requests, the order they came in, or its session. A seed that the request
            does not name comes from `seed`, its session and its prompt. Costs speed. Holds for one machine, one number
            of threads and one number of slots; weights that change under a running request change it at a moment that
            nothing fixes, so wait for requests before an update.
        seed: of the generator that gives each request without a seed its own.
        kept_sessions: sessions whose keys are kept between turns beyond the running ones; None: as many as `slots`.
        lora: sample with an adapter beside the model's layers, at first one that changes nothing: new weights are then
            the adapter's tensors alone (`LAYER.lora_A.weight`, `LAYER.lora_B.weight`), or its PEFT folder.
    """

    slots: int = 32
    max_length: int = 2048
    dtype: str = "bfloat16"
    device: str = "auto"
    threads: int = 1
    deterministic: bool = False
    seed: int = 0
    kept_sessions: int | None = None
    lora: LoraConfig | None = None

    @property
    def cache_slots(self) -> int:
        """Requests and sessions whose keys are held at once."""
        return self.slots + (self.slots if self.kept_sessions is None else self.kept_sessions)

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"lora": self.lora.model_dump() if self.lora is not None else None}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        lora = document["lora"]
        return cls(**{**document, "lora": LoraConfig(**lora) if lora is not None else None})
