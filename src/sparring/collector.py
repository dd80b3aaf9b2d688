"""Python's garbage collector in a process where many episodes run at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["seldom_collecting"]

_AFTER = 20_000  # allocations; Python's own value is 700, or 2000 in newer versions


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Inside, the collector runs seldomer, and looks through what was made inside alone.

    Episodes make many objects that stay for a while, and with each few thousand of them it would look through all that
    PyTorch and Transformers consist of once more, holding up every thread.
    """
    before = gc.get_threshold()
    gc.collect()  # or what is garbage by now would stay to the end
    gc.freeze()
    gc.set_threshold(_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
