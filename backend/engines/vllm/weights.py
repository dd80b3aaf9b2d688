"""Bringing new weights to a running vLLM server: by CUDA IPC on the same GPU, else through a folder.

By CUDA IPC it is vLLM's own weight transfer (`--weight-transfer-config '{"backend": "ipc"}'`): handles of our tensors'
memory, pickled, which it takes only with VLLM_ALLOW_INSECURE_SERIALIZATION=1. It has no transfer from a folder, so
there its workers' `reload_weights` is called.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.backend.engines.base import WeightSource
from sparring.backend.engines.remote.folder import write_folder
from sparring.backend.engines.remote.layout import WeightLayout

if TYPE_CHECKING:
    import torch

__all__ = ["StagedWeights", "load_calls", "stage"]


@dataclass(eq=False)
class StagedWeights:
    """Weights in place for a server to load: copies on the GPU, or a folder (ours to remove, or not)."""

    version: int
    copies: dict[str, torch.Tensor] | None = None
    folder: Path | None = None
    owned: tempfile.TemporaryDirectory[str] | None = None
    loaded: bool = False  # once: a folder of ours is gone by then


async def stage(
    version: int, source: WeightSource, layout: WeightLayout, previous: StagedWeights | None
) -> StagedWeights:
    """Copy `source` to where the server can load it from, in the dtype of the served model.

    The copy is ours: the trainer may go on changing its tensors. `previous` lends its memory on the GPU, whose weights
    the server has copied by now.

    Raises:
        EngineError: names or shapes do not fit `layout`.
    """
    if isinstance(source, Path):
        layout.check(WeightLayout.of_model(source).shapes)
        return StagedWeights(version, folder=source)
    named = {name: tensor.detach() for name, tensor in source if not (layout.tied and name == "lm_head.weight")}
    layout.check({name: tuple(tensor.shape) for name, tensor in named.items()})
    if all(tensor.is_cuda for tensor in named.values()):
        return _stage_on_gpu(version, named, layout.dtype, previous)
    owned = await asyncio.to_thread(write_folder, version, named.items(), layout)
    return StagedWeights(version, folder=Path(owned.name), owned=owned)


def load_calls(staged: StagedWeights) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and bodies to post, one after the other, to a paused server."""
    label = str(staged.version)
    if staged.copies is None:
        yield "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(staged.folder)}}
        yield "/update_weight_version", {"new_version": label}
        return
    yield "/start_weight_update", {}
    yield "/update_weights", {"update_info": _update_info(staged.copies)}
    yield "/finish_weight_update", {"weight_version": label}


def _stage_on_gpu(
    version: int, named: dict[str, torch.Tensor], dtype: str, previous: StagedWeights | None
) -> StagedWeights:
    import torch

    copies = previous.copies if previous is not None else None
    if copies is None or copies.keys() != named.keys():
        served = getattr(torch, dtype)
        copies = {name: torch.empty_like(tensor, dtype=served).contiguous() for name, tensor in named.items()}
    torch._foreach_copy_([copies[name] for name in named], list(named.values()))
    torch.cuda.synchronize()  # the other process reads without waiting for our stream
    return StagedWeights(version, copies=copies)


def _update_info(copies: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What vLLM's `IPCWeightTransferUpdateInfo` wants of an unpacked transfer."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    from sparring.backend.engines.remote.sharing import over_same_memory

    handles = []
    for _, tensor in over_same_memory(list(copies.items())):
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        _rebuild, arguments = reduce_tensor(tensor)
        handles.append({uuid: arguments})
    return {
        "names": list(copies),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in copies.values()],
        "shapes": [list(tensor.shape) for tensor in copies.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
