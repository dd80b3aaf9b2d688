"""Bringing new weights to a running SGLang server: by CUDA IPC on the same GPU, else through a folder.

Two steps, so that decoding stands still for the second alone: `stage` copies (and converts, checks, writes) while
requests run; `load_staged` tells the server to read.
"""

from __future__ import annotations

import asyncio
import base64
import io
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.backend.engines.base import WeightSource
from sparring.backend.engines.remote.folder import write_folder
from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.transport import Transport
from sparring.errors import EngineError

if TYPE_CHECKING:
    import torch

__all__ = ["StagedWeights", "load_staged", "stage"]

_ALIGNMENT = 256  # bytes; what the device's copy engines and kernels like


@dataclass(eq=False)
class StagedWeights:
    """Weights in place for a server to load: a CUDA buffer with its handles, or a folder (ours to remove, or not)."""

    version: int
    handles: str | None = None
    buffer: torch.Tensor | None = None
    folder: Path | None = None
    loaded: bool = False  # once: a folder of ours is gone by then
    _owned: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)


async def stage(
    version: int, source: WeightSource, layout: WeightLayout, previous: StagedWeights | None
) -> StagedWeights:
    """Copy `source` to where the server can load it from, in the dtype of the served model.

    The copy is ours: the trainer may go on changing its tensors. `previous` lends its CUDA buffer, whose weights the
    server has copied by now.

    Raises:
        EngineError: names or shapes do not fit `layout`.
    """
    if isinstance(source, Path):
        layout.check(WeightLayout.of_model(source).shapes)
        return StagedWeights(version, folder=source)
    named = [(name, tensor.detach()) for name, tensor in source if not (layout.tied and name == "lm_head.weight")]
    layout.check({name: tuple(tensor.shape) for name, tensor in named})
    if all(tensor.is_cuda for _, tensor in named):
        return _stage_on_gpu(version, named, layout.dtype, previous)
    return await asyncio.to_thread(_stage_in_folder, version, named, layout)


async def load_staged(transport: Transport, staged: StagedWeights, *, deadline_s: float) -> None:
    """Have the server read what was staged. The prefix cache is not flushed: a flush with requests pending kills it.

    Raises:
        EngineError: the server could not.
    """
    common: dict[str, Any] = {"weight_version": str(staged.version), "flush_cache": False}
    if staged.handles is not None:
        path = "/update_weights_from_tensor"
        body = common | {"serialized_named_tensors": [staged.handles]}
    else:
        path = "/update_weights_from_disk"
        body = common | {"model_path": str(staged.folder)}
    answer = await transport.post(path, body, deadline_s=deadline_s)
    if not (answer or {}).get("success"):
        raise EngineError(f"the SGLang server did not load weights {staged.version}: {(answer or {}).get('message')}")
    staged.loaded = True
    if staged._owned is not None:
        await asyncio.to_thread(staged._owned.cleanup)


def _stage_on_gpu(
    version: int, named: Iterable[tuple[str, torch.Tensor]], dtype: str, previous: StagedWeights | None
) -> StagedWeights:
    """All tensors in one buffer, so that the other process maps one allocation; kept from version to version."""
    import torch
    from torch.multiprocessing import reductions  # importing it teaches ForkingPickler about CUDA tensors

    named = list(named)
    served = getattr(torch, dtype)
    offsets, size = [], 0
    for _, tensor in named:
        offsets.append(size)
        size += -(-tensor.numel() * served.itemsize // _ALIGNMENT) * _ALIGNMENT
    buffer = previous.buffer if previous is not None else None
    if buffer is None or buffer.numel() != size:
        buffer = torch.empty(size, dtype=torch.uint8, device=named[0][1].device)
    views = []
    for (name, tensor), offset in zip(named, offsets, strict=True):
        view = buffer[offset : offset + tensor.numel() * served.itemsize].view(served).view(tensor.shape)
        views.append((name, view))
    torch._foreach_copy_([view for _, view in views], [tensor for _, tensor in named])
    torch.cuda.synchronize(buffer.device)  # the other process reads without waiting for our stream
    del reductions
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump(views)
    return StagedWeights(version, handles=base64.b64encode(pickled.getvalue()).decode(), buffer=buffer)


def _stage_in_folder(version: int, named: Iterable[tuple[str, torch.Tensor]], layout: WeightLayout) -> StagedWeights:
    owned = write_folder(version, named, layout)
    return StagedWeights(version, folder=Path(owned.name), _owned=owned)
