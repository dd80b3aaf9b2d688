"""The other processes of `benchmarks.gateway`, and its client: one connection, one request at a time, no library."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.gateway.http import GatewayServer
from sparring.backend.models import resolve_model

__all__ = ["ADMIN_KEY", "Connection", "Served", "free_port", "serve"]

ADMIN_KEY = "a key of the benchmark's own"
ANSWER = "Answer: 23"
_START_S = 300.0


@dataclass(frozen=True)
class Served:
    """A server in a process of its own."""

    pid: int
    port: int

    @property
    def resident_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    @property
    def processor_s(self) -> float:
        """Time on a processor so far, which other programs on the machine change little."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def serve(command: list[str], port: int, path: str, cpu: int) -> AsyncIterator[Served]:
    """Run a server pinned to one processor until it answers `path`, and end it afterwards."""
    process = await asyncio.create_subprocess_exec(
        "taskset", "-c", str(cpu), *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                async with Connection(port) as connection:
                    if (await connection.request("GET", path))[0] == 200:
                        break
            except OSError:
                pass
            if time.monotonic() > deadline or process.returncode is not None:
                raise SystemExit(f"{command[0]} did not come up on port {port}")
            await asyncio.sleep(0.2)
        yield Served(process.pid, port)
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(30):
            await process.wait()


class Connection:
    """A kept-alive HTTP/1.1 connection to a server of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def request(self, method: str, path: str, body: Any = None, key: str = "x") -> tuple[int, bytes]:
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in answer.split(b"\r\n")[1:] if b": " in line)
        status = int(answer.split(b" ", 2)[1])
        if b"content-length" in fields:
            return status, await self._reader.readexactly(int(fields[b"content-length"]))
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return status, b"".join(parts)


async def _serve_gateway(port: int) -> None:
    folder = resolve_model("smollm2")
    chat = ChatFormat.load(folder, tool_template="hermes")
    ids = [*chat.encode_text(ANSWER), chat.end_ids[0]]
    engine = ScriptedEngine(lambda _: ids)
    engine.log = deque(maxlen=1)  # type: ignore[assignment]  # it would keep every request that it ever had
    await engine.start()
    recorder = Recorder(engine, chat, SamplingParams(max_new_tokens=64), max_length=8192)
    async with GatewayServer(recorder, port=port, admin_key=ADMIN_KEY):
        await asyncio.Event().wait()


def _stub() -> Any:
    """The scripted engine as an OpenAI server that does nothing else: what LiteLLM stands in front of."""
    message = {"role": "assistant", "content": ANSWER}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 100, "completion_tokens": 6, "total_tokens": 106}
    completion = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
    content = json.dumps(completion | {"usage": usage}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["gateway", "stub"])
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    if arguments.part == "gateway":
        asyncio.run(_serve_gateway(arguments.port))
    else:
        uvicorn.run(_stub(), port=arguments.port, lifespan="off", log_level="warning", access_log=False)


if __name__ == "__main__":
    sys.exit(main())
