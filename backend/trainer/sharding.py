"""A model in shards over the ranks, by torch's `fully_shard` (FSDP2, arXiv:2304.11277): a rank holds its part of each
parameter, of its gradient and of its moments.

A decoder layer is whole only while it computes. Embedding, last norm and head are whole during a pass: the head reads
the embedding's weight inside the model's forward, where it is a plain tensor, so its gradient is summed like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from sparring.errors import ConfigError

__all__ = ["part_of", "shard", "whole", "whole_parameters", "whole_state"]


def shard(model: PreTrainedModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Leave each rank of `mesh` its part of the model, on its device. Nothing is sent: all ranks loaded the same.

    Parts keep their type, which is float32 for what is trained; layers are gathered in `compute_dtype`, and gradients
    are summed in float32.

    Raises:
        ConfigError: the architecture keeps its layers elsewhere than in `layers`.
    """
    base: Any = model.base_model
    if not hasattr(base, "layers"):
        raise ConfigError(f"trainer.sharding=fsdp2: {type(model).__name__} has no list of layers; set it to none")
    narrow = compute_dtype in (torch.bfloat16, torch.float16)
    # Inputs stay as they are: a row holds log-probabilities and advantages, which are float32 in any case.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype if narrow else None,
        reduce_dtype=torch.float32 if narrow else None,
        cast_forward_inputs=False,
    )
    for layer in base.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # transformers' Trainer then leaves placement and the sum of gradients to the model, and wraps nothing around it.
    model._is_distributed_loading_by_transformers = True


def whole(tensor: Tensor) -> Tensor:
    """The tensor without its history; of a shard, gathered: all ranks ask for the same ones in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """What `like`'s rank holds of a tensor that every rank has whole. Nothing is sent."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and whole parameters, one at a time, as `named_parameters` gives them: a collective, as `whole`."""
    _reshard(model)
    for name, parameter in model.named_parameters():
        yield name, whole(parameter)


def whole_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of `state_dict`, shards gathered one at a time and on the host: a collective, as `whole`.

    Tied parameters share their memory here too, as files of models expect.
    """
    _reshard(model)
    state = model.state_dict(keep_vars=True)
    names = Counter(id(tensor) for tensor in state.values())
    shared: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if (full := shared.get(id(tensor))) is None:
            full = whole(tensor).cpu() if isinstance(tensor, DTensor) else tensor.detach()
            if names[id(tensor)] > 1:
                shared[id(tensor)] = full
        yield name, full


def _reshard(model: nn.Module) -> None:
    """A forward without a backward leaves embedding and head whole, in the compute type: the masters are the parts."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
