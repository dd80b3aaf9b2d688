"""A Docker daemon, spoken to through the docker SDK off the event loop: bounded threads, a deadline on every call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sparring.errors import SandboxError
from sparring.extras import missing

__all__ = ["ContainerGone", "DockerDaemon"]

T = TypeVar("T")
_OLDEST_API = (1, 41)
_THREADS = 16


class ContainerGone(SandboxError):
    """The container is not there, or is not running, although nobody here stopped it."""


class DockerDaemon:
    """One connection pool to one daemon. Used from one event loop.

    Args:
        host: as DOCKER_HOST, which is the default: unix:///path or tcp://host:port without TLS. A daemon elsewhere is
            best reached by a tunnel: `ssh -NL /tmp/docker.sock:/var/run/docker.sock HOST`.
    """

    def __init__(self, host: str | None = None) -> None:
        self.host = host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self.api: Any = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sparring-docker")

    async def connect(self, *, timeout_s: float = 10.0) -> None:
        """Find the daemon and agree on an API version.

        Raises:
            SandboxError: no answer, too old, TLS, or no docker SDK.
        """
        if lack := missing(["docker"], "a sandbox in Docker"):
            raise SandboxError(lack)
        import docker

        if not self.host.startswith(("unix://", "tcp://", "http://")) or os.environ.get("DOCKER_TLS_VERIFY"):
            raise SandboxError(f"DOCKER_HOST={self.host}: only unix:// and plain tcp://; tunnel its socket by ssh")

        def connect() -> Any:
            return docker.APIClient(base_url=self.host, version="auto", timeout=60, max_pool_size=_THREADS)

        self.api = await self.call(connect, timeout_s=timeout_s)
        version = tuple(int(part) for part in self.api.api_version.split("."))
        if version < _OLDEST_API:
            oldest = ".".join(map(str, _OLDEST_API))
            raise SandboxError(f"{self.host} speaks API {self.api.api_version}; {oldest} is needed")

    async def close(self) -> None:
        """Calls in flight end by their own time limits; nobody waits for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.api is not None:
            self.api.close()

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a blocking call in a thread of this daemon."""
        try:
            return asyncio.get_running_loop().run_in_executor(self._threads, function)
        except RuntimeError:
            raise SandboxError(f"the connection to {self.host} was closed") from None

    async def call(self, function: Callable[[], T], *, timeout_s: float = 30.0) -> T:
        """As `submit`, awaited, its errors translated. At the deadline the thread goes on alone.

        Raises:
            ContainerGone: the daemon does not know the container, or it does not run.
            SandboxError: the daemon refused, did not answer, or not in time.
        """
        return await self.result(self.submit(function), timeout_s=timeout_s)

    async def result(self, future: asyncio.Future[T], *, timeout_s: float) -> T:
        """What a submitted call gives, as `call`."""
        import docker.errors
        import requests.exceptions

        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except TimeoutError:
            future.add_done_callback(_consume)
            raise SandboxError(f"the Docker daemon at {self.host} did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            future.add_done_callback(_consume)
            raise
        except docker.errors.ImageNotFound as error:
            raise SandboxError(f"{error.explanation}; build it (make images) or load it: nothing is pulled") from error
        except docker.errors.APIError as error:
            message = f"Docker refused: {error.explanation or error}"
            # 404: no such container; 409: it is not running, or is being removed.
            raise (ContainerGone if error.status_code in (404, 409) else SandboxError)(message) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise SandboxError(f"no Docker daemon answers at {self.host}: {error}; is it running?") from error


def _consume(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
