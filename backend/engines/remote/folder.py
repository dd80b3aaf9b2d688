"""New weights as a folder that a server on the same machine can read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.backend.engines.remote.layout import WeightLayout

if TYPE_CHECKING:
    import torch

__all__ = ["write_folder"]

_SHARED_MEMORY = Path("/dev/shm")


def write_folder(
    version: int, named: Iterable[tuple[str, torch.Tensor]], layout: WeightLayout
) -> tempfile.TemporaryDirectory[str]:
    """A Hugging Face folder of tensors in the served type, in shared memory if there is some; the caller removes it.

    Nobody but this user can read it, so the server must run as the same one.
    """
    import torch
    from safetensors.torch import save_file

    served = getattr(torch, layout.dtype)
    where = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    owned = tempfile.TemporaryDirectory(prefix=f"sparring-weights-{version}-", dir=where)
    folder = Path(owned.name)
    tensors = {name: tensor.to("cpu", served).contiguous() for name, tensor in named}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(layout.folder / "config.json", folder)
    for file in folder.iterdir():
        file.chmod(0o600)  # the folder has 0700 from its birth
    return owned
