"""Clients that open a connection and are in no hurry: each is let go of, and nobody who is served is."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from sparring.backend.gateway.http.head_deadline import HeadDeadlineProtocol

TIMEOUT_S = 0.2
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setattr(HeadDeadlineProtocol, "head_timeout_s", TIMEOUT_S)


@pytest.fixture
def connect(serve):
    """A plain socket to a server that says one text."""

    @asynccontextmanager
    async def connect_():
        async with serve("four<|im_end|>") as (server, recorder, _):
            host, port = server.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            yield reader, writer, recorder
            writer.close()

    return connect_


async def answered(reader) -> bytes:
    """The status line of one answer, whose body is read too."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [line[15:] for line in head.lower().splitlines() if line.startswith(b"content-length:")]
    await reader.readexactly(int(length))
    return head.splitlines()[0]


async def seconds_until_closed(reader, trickle=lambda: None) -> float:
    """How long the server keeps the connection, while `trickle` sends something every few milliseconds."""
    began, gone = time.monotonic(), asyncio.ensure_future(reader.read(1))
    while not gone.done() and time.monotonic() < began + 5:
        trickle()
        await asyncio.wait([gone], timeout=TIMEOUT_S / 10)
    assert gone.done()
    assert gone.exception() is not None or gone.result() == b""
    return time.monotonic() - began


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", HEALTH[:-2]], ids=["nothing", "a method", "half a head"])
async def test_a_head_that_does_not_come_ends_the_connection(connect, sent):
    async with connect() as (reader, writer, _):
        writer.write(sent)
        assert TIMEOUT_S / 2 < await seconds_until_closed(reader) < 3


async def test_a_head_that_trickles_buys_no_time(connect):
    async with connect() as (reader, writer, _):
        writer.write(HEALTH[:-2])
        assert await seconds_until_closed(reader, lambda: writer.write(b"a: b\r\n")) < 3


async def test_neither_does_the_second_head_of_a_connection(connect):
    async with connect() as (reader, writer, _):
        writer.write(HEALTH)
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        writer.write(HEALTH[:5])
        assert TIMEOUT_S / 2 < await seconds_until_closed(reader) < 3


@pytest.mark.parametrize("bytes_", [b"\r\n", b"x"], ids=["blank lines", "a body that nobody reads"])
async def test_nor_bytes_behind_an_answer_that_are_no_head(connect, bytes_):
    async with connect() as (reader, writer, _):
        announced = b"content-length: 1000000\r\n\r\n" if bytes_ == b"x" else b"\r\n"
        writer.write(HEALTH[:-2] + announced)
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        assert await seconds_until_closed(reader, lambda: writer.write(bytes_)) < 3


async def test_who_is_served_or_idles_between_requests_is_kept(connect):
    async with connect() as (reader, writer, recorder):
        recorder.open_session("s", turn_budget=5, token_budget=500, api_key="key")
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "2 + 2?"}]}'
        fields = b"host: x\r\nauthorization: Bearer key\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + fields + body[:10])
        await asyncio.sleep(2 * TIMEOUT_S)  # the deadline is a time: only time shows that it does not hold here
        writer.write(body[10:])
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        await asyncio.sleep(2 * TIMEOUT_S)
        writer.write(HEALTH)
        assert await answered(reader) == b"HTTP/1.1 200 OK"
