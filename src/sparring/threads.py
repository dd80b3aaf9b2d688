"""Blocking calls beside an event loop that nothing can cut short."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["in_daemon_thread"]


def in_daemon_thread(call: Callable[[], Any], name: str) -> asyncio.Future[Any]:
    """What `call` gives, on the running loop. A daemon thread: one that hangs keeps no process alive.

    What is no `Exception`, such as a SystemExit of the call's, becomes a RuntimeError. A future that was cancelled
    leaves the thread to itself.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # given up
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        with suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
