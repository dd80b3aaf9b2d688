"""Ctrl-C at a moment at which the trainer's state is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["InterruptGuard"]


class InterruptGuard:
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt at once, but between `hold` and `release` only at
    `release`.

    Whoever handled them before hears of each first, and may do otherwise than raise. A second one while held raises at
    once: the user insists, and `held` says that the state is torn. Outside the main thread it does nothing, since
    signals arrive in the main thread alone.
    """

    def __init__(self) -> None:
        self.held = False
        self._pending = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held = self._pending = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def hold(self) -> None:
        """From here on the state is between two steps."""
        self.held = True

    @property
    def pending(self) -> bool:
        """Whether a signal waits for `release`."""
        return self._pending

    def release(self, interrupted: bool | None = None) -> None:
        """The state is whole again.

        Args:
            interrupted: what several ranks agreed upon, instead of this one's own `pending`.
        """
        self.held = False
        if self._pending if interrupted is None else interrupted:
            self._pending = False
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._previous[number]
        try:
            if callable(before):
                before(number, frame)
                return
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if not self.held or self._pending:
                raise
            self._pending = True
