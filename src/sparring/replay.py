"""A recorder that hears what was said elsewhere: given replies, token for token, recorded as a model's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder

__all__ = ["replaying"]


@asynccontextmanager
async def replaying(
    replies: Sequence[Sequence[int]], chat: ChatFormat, sampling: SamplingParams, *, max_length: int
) -> AsyncIterator[Recorder]:
    """A recorder whose engine gives these replies in order. Both end with the block, however that ends."""
    engine = ScriptedEngine([list(reply) for reply in replies])
    await engine.start()
    try:
        recorder = Recorder(engine, chat, sampling, max_length=max_length)
        try:
            yield recorder
        finally:
            await recorder.aclose()
    finally:
        await engine.stop()
