"""The way out of a sandbox that has an allow-list.

The sandbox keeps its `--network none`. A proxy container, which has a network, listens on a Unix socket in a volume
that both mount; inside the sandbox a forwarder listens on the loopback address that the proxy variables name. So no
route, bridge or firewall rule is relied upon: what the proxy refuses cannot be reached at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from typing import ClassVar

from sparring.errors import SandboxError
from sparring.sandbox.daemon import DockerDaemon
from sparring.sandbox.owner import Owner
from sparring.sandbox.reaper import labels

__all__ = ["PROXY_ENV", "Egress"]

PROXY_IMAGE = "sparring/proxy:latest"
_PORT = 3128
_URL = f"http://127.0.0.1:{_PORT}"
PROXY_ENV = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _URL)
_READY_S = 20.0
_FORWARDER = f"""
import asyncio
async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
async def serve(reader, writer):
    up_reader = up_writer = None
    try:
        up_reader, up_writer = await asyncio.open_unix_connection("/run/egress/proxy.sock")
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))
    except OSError:
        pass
    finally:
        writer.close()
        up_writer and up_writer.close()
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", {_PORT}) as server:
        await server.serve_forever()
asyncio.run(main())
"""
_WAIT = f"""
import socket, sys, time
end = time.monotonic() + {_READY_S}
while time.monotonic() < end:
    try: sys.exit(socket.create_connection(("127.0.0.1", {_PORT}), 1).close())
    except OSError: time.sleep(0.02)
sys.exit(1)
"""

_LIFETIME_S = 30 * 24 * 3600.0  # longer than a run lasts; of an owner that has ended it is removed at once


class Egress:
    """One proxy container and its volume, for all sandboxes of a provider with the same allow-list.

    SPARRING_EGRESS_NETWORK names the proxy's Docker network (default `bridge`).
    """

    FOLDER: ClassVar[str] = "/run/egress"

    def __init__(self, daemon: DockerDaemon, owner: Owner, allowed: tuple[str, ...]) -> None:
        self._daemon = daemon
        self._owner = owner
        self._allowed = allowed
        self._name = f"sparring-egress-{uuid.uuid4().hex[:12]}"
        self._lock = asyncio.Lock()
        self._running = False

    async def volume(self) -> str:
        """The volume with the proxy's socket; the proxy runs.

        Raises:
            SandboxError: it did not start.
        """
        async with self._lock:
            if not self._running:
                await self._start()
                self._running = True
        return self._name

    async def _start(self) -> None:
        api = self._daemon.api
        marks = labels(self._owner, _LIFETIME_S)

        def start() -> None:
            api.create_volume(self._name, labels=marks)
            api.create_container(
                PROXY_IMAGE,
                [f"{self.FOLDER}/proxy.sock", *self._allowed],
                name=self._name,
                labels=marks,
                host_config=api.create_host_config(
                    network_mode=os.environ.get("SPARRING_EGRESS_NETWORK", "bridge"),
                    binds={self._name: {"bind": self.FOLDER, "mode": "rw"}},
                    read_only=True,
                    cap_drop=["ALL"],
                    security_opt=["no-new-privileges"],
                    pids_limit=64,
                    mem_limit="256m",
                    init=True,
                ),
            )
            api.start(self._name)
            for line in api.logs(self._name, stream=True, follow=True):
                if b"ready" in line:
                    return
            raise SandboxError(f"the egress proxy ended: {api.logs(self._name)[-500:]!r}")

        try:
            await self._daemon.call(start, timeout_s=_READY_S)
        except BaseException:
            await self.close()
            raise

    async def open_inside(self, container: str) -> None:
        """Start the forwarder in a sandbox, as root so that the sandbox's user cannot end it, and wait for it."""
        api = self._daemon.api

        def start() -> int:
            forward = ["python3", "-c", _FORWARDER]
            forwarder = api.exec_create(container, forward, user="0:0", stdout=False, stderr=False)
            api.exec_start(forwarder["Id"], detach=True)
            wait = api.exec_create(container, ["python3", "-c", _WAIT], user="0:0")
            api.exec_start(wait["Id"])
            return int(api.exec_inspect(wait["Id"])["ExitCode"])

        if await self._daemon.call(start, timeout_s=_READY_S + 5.0) != 0:
            raise SandboxError("the way to the egress proxy did not open; an allow-list needs python3 in the image")

    async def close(self) -> None:
        """Remove the proxy and its volume."""
        api = self._daemon.api

        def remove() -> None:
            import docker.errors

            with contextlib.suppress(docker.errors.NotFound):
                api.remove_container(self._name, force=True, v=True)
            with contextlib.suppress(docker.errors.NotFound):
                api.remove_volume(self._name)

        with contextlib.suppress(SandboxError):
            await self._daemon.call(remove, timeout_s=60.0)
