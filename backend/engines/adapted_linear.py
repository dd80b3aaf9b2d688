"""Linear layers with a low-rank adapter beside them (LoRA, arXiv:2106.09685), for inference."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparring.backend.lora import adapted_layers
from sparring.config import LoraConfig

__all__ = ["AdaptedLinear", "add_adapter"]


class AdaptedLinear(nn.Module):
    """y = base(x) + scale · B(A(x)), as the trainer computes it.

    Never merged: base weights in bfloat16 would round most of a small update away (half a unit in the last place of
    0.02 is 4e-5), and the engine would go on sampling from the policy before it.
    """

    def __init__(self, base_layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer, self._scale = base_layer, scale
        kind = {"device": base_layer.weight.device, "dtype": base_layer.weight.dtype}
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, **kind)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, **kind)  # type: ignore[arg-type]
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.base_layer(x), self.lora_B(self.lora_A(x)), alpha=self._scale)


def add_adapter(model: PreTrainedModel, lora: LoraConfig) -> set[str]:
    """Put an adapter that changes nothing yet beside the layers of `model`.

    Returns:
        The names of its tensors, such as `model.layers.0.self_attn.q_proj.lora_A.weight`.
    """
    names = set()
    for name in adapted_layers(model, lora):
        parent, _, child = name.rpartition(".")
        adapted = AdaptedLinear(model.get_submodule(name), lora.rank, lora.alpha / lora.rank)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), child, adapted)
        names |= {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
    return names
