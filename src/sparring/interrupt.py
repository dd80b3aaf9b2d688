"""Ctrl-C at a command: the first one ends it in order, a second one at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

__all__ = ["insisted", "interruptible", "interruptibly", "process_groups"]

_T = TypeVar("_T")

process_groups: set[int] = set()
"""Of programs that outlive this process unless somebody ends them: each by the id of its group."""

_ECHO_S = 2.0  # torchrun sends a Ctrl-C on to processes that the terminal has sent it already


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def interruptible(stop: Callable[[], object] = _interrupt) -> Iterator[None]:
    """The first SIGINT, or a scheduler's SIGTERM, calls `stop`, which raises KeyboardInterrupt by default; another one
    is `insisted`. Outside the main thread, where no signals arrive, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at: float | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            os.write(2, b"\nstopping, which takes a few seconds; another Ctrl-C ends it at once\n")
            stop()
        elif "TORCHELASTIC_RUN_ID" not in os.environ or now - asked_at > _ECHO_S:
            insisted(number, frame)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def interruptibly(work: Coroutine[Any, Any, _T]) -> _T:
    """Do `work` in this task, which is cancelled where `interruptible` would stop."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    with interruptible(lambda: loop.call_soon_threadsafe(task.cancel)):
        return await work


def insisted(number: int, frame: FrameType | None) -> None:
    """A signal's handler: end this process and `process_groups` now, with one line and no clean-up. What a run has
    written stays whole, as after `kill -9`.
    """
    for group in tuple(process_groups):
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")  # a live picture hides the cursor
    os.write(2, b"\nended at once; --resume goes on with a run from its last checkpoint\n")
    os._exit(130)
