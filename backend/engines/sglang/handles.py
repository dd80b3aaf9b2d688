"""Handles to memory of this process, in the form in which SGLang's `/update_weights_from_tensor` opens them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

from torch import Tensor, multiprocessing
from torch.multiprocessing import reductions  # noqa: F401  # importing it teaches ForkingPickler about tensors

from sparring.backend.engines.remote.sharing import over_same_memory

__all__ = ["handles"]


def handles(views: Sequence[tuple[str, Tensor]]) -> str:
    """Base64 of pickled named tensors: their memory is shared, not copied, so it must stay as it is until it was read.

    Memory of a GPU goes by CUDA IPC; that of a CPU by a file in shared memory, which its readers open by name.
    """
    if all(view.is_cuda for _, view in views):
        views = over_same_memory(views)
    pickled = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(pickled).dump(list(views))
    return base64.b64encode(pickled.getvalue()).decode()


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """The other way, file descriptors, works among processes of one family alone."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
