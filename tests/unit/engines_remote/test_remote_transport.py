"""Connections that break, on raw sockets."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from sparring.backend.engines.remote.transport import Transport
from sparring.errors import EngineError


@asynccontextmanager
async def server(answers):
    """Answers connection after connection: bytes, or None for a connection closed without a byte."""
    remaining = iter(answers)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        answer = next(remaining)
        if answer is not None:
            writer.write(answer)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        transport = Transport(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        yield transport
        await transport.close()


def http(body, status="200 OK", kind="application/json", length=None):
    raw = json.dumps(body).encode() if not isinstance(body, bytes) else body
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length or len(raw)}\r\n\r\n"
    return head.encode() + raw


async def test_a_connection_dropped_before_the_first_byte_is_tried_again():
    async with server([None, None, http({"ok": 1})]) as transport:
        assert await transport.post("/generate", {}, deadline_s=5, repeatable=True) == {"ok": 1}


async def test_what_must_not_be_done_twice_is_sent_once():
    async with server([None, http({"ok": 2})]) as transport:
        with pytest.raises(EngineError, match="dropped the connection"):
            await transport.post("/release_memory_occupation", {}, deadline_s=5)
        assert await transport.get("/model_info", deadline_s=5) == {"ok": 2}


async def test_what_is_sent_once_meets_no_connection_that_the_server_is_about_to_close():
    """A server that closes each connection after an answer, as it does with one that idled, without saying so."""
    async with server([http({"ok": n}) for n in range(20)]) as transport:
        for n in range(0, 20, 2):
            assert await transport.get("/model_info", deadline_s=5) == {"ok": n}
            assert await transport.post("/release_memory_occupation", {}, deadline_s=5) == {"ok": n + 1}


async def test_a_server_that_always_drops_is_an_error():
    async with server([None] * 10) as transport:
        with pytest.raises(EngineError, match="dropped the connection"):
            await transport.post("/generate", {}, deadline_s=5, repeatable=True)


async def test_an_answer_that_breaks_off_is_not_asked_for_again():
    async with server([http({"ok": 1}, length=999), http({"ok": 2})]) as transport:
        with pytest.raises(EngineError, match="dropped the connection"):
            await transport.post("/generate", {}, deadline_s=5, repeatable=True)


async def test_a_stream_that_broke_after_an_event_is_not_begun_again():
    event = b'data: {"n": 1}\n\n'
    async with server([http(event, kind="text/event-stream", length=999), http({})]) as transport:
        events = transport.stream("/generate", {}, deadline_s=5)
        assert await anext(events) == {"n": 1}
        with pytest.raises(EngineError, match="dropped the connection"):
            await anext(events)


async def test_silence_has_a_deadline():
    async def never(reader, writer):
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(never, "127.0.0.1", 0)
    async with listening:
        transport = Transport(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        with pytest.raises(EngineError, match=r"no answer in 0\.1 s"):
            await transport.post("/pause_generation", {}, deadline_s=0.1)
        await transport.close()


async def test_an_error_page_is_quoted():
    async with server([http(b"<h1>nginx</h1>", status="502 Bad Gateway", kind="text/html")]) as transport:
        with pytest.raises(EngineError, match="answered 502: '<h1>nginx</h1>'"):
            await transport.get("/model_info", deadline_s=5)


@pytest.mark.parametrize("body", [b"<html>It works!</html>", ["a", "list"], None])
async def test_what_answers_with_no_object_says_nothing(body):
    async with server([http(body)]) as transport:
        assert await transport.get("/model_info", deadline_s=5) == {}


async def test_a_request_under_way_as_the_transport_closes_is_an_error():
    asked = asyncio.Event()

    async def never(reader, writer):
        asked.set()
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(never, "127.0.0.1", 0)
    async with listening:
        transport = Transport(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        asking = asyncio.create_task(transport.get("/model_info", deadline_s=5))
        await asked.wait()
        await transport.close()
        with pytest.raises(EngineError, match="closed"):
            await asking
