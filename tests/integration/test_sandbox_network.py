"""A sandbox with an allow-list reaches what is on it, through the proxy, and nothing else."""

import ast
import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sparring.errors import ConfigError
from sparring.sandbox import SandboxSpec, bubblewrap, open_provider

pytestmark = [pytest.mark.slow, pytest.mark.docker]
SPEC = SandboxSpec(memory_mib=128, disk_mib=32, pids=64)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"path={self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[int, int]]:
    """Two web servers on this machine; the first is to be allowed."""
    running = [HTTPServer(("127.0.0.1", 0), _Handler) for _ in range(2)]
    for server in running:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield running[0].server_port, running[1].server_port
    for server in running:
        server.shutdown()
        server.server_close()


def fetch(url: str) -> str:
    return (
        "import urllib.request, urllib.error\n"
        f"try: print(urllib.request.urlopen({url!r}, timeout=10).read().decode())\n"
        "except urllib.error.HTTPError as error: print(error.code, error.read().decode())\n"
        "except OSError as error: print(error)\n"
    )


TUNNEL = """
import socket
def ask(target):
    s = socket.create_connection(("127.0.0.1", 3128), 10)
    s.sendall(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode())
    answer = s.recv(4096).split(b"\\r\\n")[0].decode()
    if "200" in answer:
        s.sendall(b"GET /tunnelled HTTP/1.0\\r\\n\\r\\n")
        answer += " " + b"".join(iter(lambda: s.recv(4096), b"")).split(b"\\r\\n\\r\\n")[1].decode()
    return answer
print([ask(target) for target in ("127.0.0.1:%d", "127.0.0.1:%d", "[::1]:22", "x" * 70000 + ":1")])
"""
DIRECT = """
import socket
try: socket.create_connection(("127.0.0.1", %d), 2); print("REACHED")
except OSError: print("no")
"""
# After an allowed request on the same connection, one to somewhere else.
SMUGGLE = """
import socket
s = socket.create_connection(("127.0.0.1", 3128), 10)
for url in ("http://127.0.0.1:%d/one", "http://127.0.0.1:%d/two"):
    s.sendall(f"GET {url} HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n".encode())
print(b"".join(iter(lambda: s.recv(4096), b"")))
"""


async def test_an_allow_list(servers: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARRING_EGRESS_NETWORK", "host")  # the servers are on this machine's loopback device
    allowed, other = servers
    spec = replace(SPEC, network=(f"127.0.0.1:{allowed}", "localhost:80"))
    async with await open_provider("docker") as provider:
        first, second = await asyncio.gather(provider.take(spec), provider.take(spec))

        async def python(code: str) -> str:
            return (await first.exec(["python3", "-c", code], timeout_s=20)).stdout.strip()

        assert await python(fetch(f"http://127.0.0.1:{allowed}/a?b")) == "path=/a?b"
        assert "allow-list" in await python(fetch(f"http://127.0.0.1:{other}/"))
        assert "allow-list" in await python(fetch("http://example.org/"))
        assert "no public address" in await python(fetch("http://localhost/")), "a name may not lead inside"
        assert await python(DIRECT % allowed) == "no"
        tunnelled, refused, inner, long = ast.literal_eval(await python(TUNNEL % (allowed, other)))
        assert tunnelled.endswith("path=/tunnelled")
        assert "403" in refused
        assert "403" in inner
        assert "200" not in long
        smuggled = await python(SMUGGLE % (allowed, other))
        assert "path=/one" in smuggled
        assert "path=/two" not in smuggled
        bomb = await first.exec("trap '' TERM; kill -STOP $PPID; sleep 60", timeout_s=0.5)
        assert bomb.timed_out
        assert await python(fetch(f"http://127.0.0.1:{allowed}/after")) == "path=/after", "the way out is open again"
        result = await second.exec(["python3", "-c", fetch(f"http://127.0.0.1:{allowed}/2")], timeout_s=20)
        assert result.stdout == "path=/2\n"
        await asyncio.gather(first.stop(), second.stop())


def test_bubblewrap_has_no_allow_list() -> None:
    with pytest.raises(ConfigError, match="needs Docker"):
        bubblewrap.BubblewrapSandbox(replace(SPEC, network=("example.org:443",)))
