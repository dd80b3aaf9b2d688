"""Answers over a connection that may go away: streams of events, and requests that end with their client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from sparring.errors import GatewayError

__all__ = ["event", "event_stream", "merged", "unless_disconnected"]

_T = TypeVar("_T")
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def unless_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """Await `work`, or cancel it when the client goes away.

    Raises:
        GatewayError: status 499, nobody is there to read the answer.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GatewayError("the client disconnected", status=499)
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.wait((task, watch))
        if not task.cancelled():
            task.exception()  # what failed for nobody is no news


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: Any, name: str | None = None) -> str:
    """One server-sent event."""
    prefix = f"event: {name}\n" if name else ""
    return f"{prefix}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def event_stream(request: Request, events: AsyncGenerator[str, None]) -> StreamingResponse:
    """A response of these events. What fails before the first one is an error with its own status."""
    try:
        first = await unless_disconnected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise

    async def body() -> AsyncGenerator[str, None]:
        async with aclosing(events):
            yield first
            async for item in events:
                yield item

    return StreamingResponse(body(), media_type="text/event-stream", headers=_HEADERS)


async def merged(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """The items of several streams as they come, each with the index of its stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, _T] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_forward(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        for _ in streams:
            while (got := await queue.get()) is not None:
                if isinstance(got, BaseException):
                    raise got
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _forward(
    index: int, stream: AsyncGenerator[_T, None], queue: asyncio.Queue[tuple[int, _T] | BaseException | None]
) -> None:
    async with aclosing(stream):
        try:
            async for item in stream:
                queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
