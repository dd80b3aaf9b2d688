"""Deadlines that somebody else brings forward."""

from __future__ import annotations

import asyncio

__all__ = ["end_now"]


def end_now(wait: asyncio.Timeout) -> None:
    """End what is waited for inside `wait` as its deadline would. One that has passed ends it anyhow, and until it has,
    `reschedule` would raise.
    """
    if not wait.expired():
        wait.reschedule(0)
