"""Memory of this process that other processes read, update after update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["over_same_memory"]


def over_same_memory(views: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The same tensors, on storages of their own.

    Whenever PyTorch shares a tensor of a GPU, it wraps the memory of its storage in one more layer. A buffer that lives
    on, and whose hundreds of views are shared for every update, would have so many of them after some dozen updates
    that freeing them, each from within the last, is thought to overflow the stack (seen: a crash after 63 updates).
    """
    fresh: dict[int, torch.UntypedStorage] = {}
    moved = []
    for name, view in views:
        storage = view.untyped_storage()
        if storage.data_ptr() not in fresh:
            whole = torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage)
            fresh[storage.data_ptr()] = torch.from_dlpack(whole).untyped_storage()
        twin = torch.empty(0, dtype=view.dtype, device=view.device)
        place = view.storage_offset(), view.shape, view.stride()
        moved.append((name, twin.set_(fresh[storage.data_ptr()], *place)))
    return moved
