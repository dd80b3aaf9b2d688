"""Ctrl-C at a moment at which the trainer's state is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["InterruptGuard"]


class InterruptGuard:
    """While entered, SIGINT raises KeyboardInterrupt at once, but between `hold` and `release` only at `release`.

    A second SIGINT while held raises at once: the user insists. Outside the main thread it does nothing, since
    signals arrive in the main thread alone.
    """

    def __init__(self) -> None:
        self._held = False
        self._pending = False
        self._previous: Any = None

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = self._pending = False
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def hold(self) -> None:
        """From here on the state is between two steps."""
        self._held = True

    def release(self) -> None:
        """The state is whole again."""
        self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._held and not self._pending:
            self._pending = True
            return
        raise KeyboardInterrupt
