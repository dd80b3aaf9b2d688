"""Sandboxes in Docker containers: no network, no capabilities, a read-only root, everything bounded."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparring.errors import SandboxError
from sparring.sandbox.command import held_to, in_folder
from sparring.sandbox.core import Sandbox
from sparring.sandbox.daemon import ContainerGone, DockerDaemon
from sparring.sandbox.docker_exec import DockerProcess
from sparring.sandbox.egress import PROXY_ENV, Egress
from sparring.sandbox.owner import Owner
from sparring.sandbox.process import OnOutput
from sparring.sandbox.provider import SandboxProvider
from sparring.sandbox.reaper import OWNER_LABEL, labels, reap
from sparring.sandbox.spec import MIB, SandboxSpec

__all__ = ["CONTAINER_ARGV", "DEFAULT_IMAGE", "DockerProvider", "DockerSandbox", "container_options"]

DEFAULT_IMAGE = "sparring/python:latest"
AGENT = "1000:1000"
# The container's own process: it idles on a pipe that nobody writes to, without ever forking, so that it lives and
# works at the process limit too, and on SIGUSR1 kills all else. It runs as root with CAP_KILL alone; what the model
# runs has another user and no capability, and so can neither kill it nor do what it does.
_MAIN = """
trap 'kill -9 -1' USR1
mkfifo -m 600 /tmp/.idle && exec <>/tmp/.idle && rm /tmp/.idle && while :; do read -r _; done
"""
CONTAINER_ARGV = ("/bin/sh", "-c", _MAIN)
_OWN = 2  # processes of a container that nothing runs in: docker-init and its own
_PURGE_S = 10.0
_ENV = {"HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat"}


def container_options(spec: SandboxSpec) -> dict[str, Any]:
    """Arguments of the SDK's `create_host_config` that harden a container for `spec`."""
    memory = spec.total_memory_mib * MIB
    return {
        "init": True,
        "network_mode": "none",
        "read_only": True,
        "tmpfs": {
            spec.workdir: f"rw,exec,nosuid,nodev,size={spec.disk_mib}m,uid=1000,gid=1000,mode=755",
            "/tmp": f"rw,exec,nosuid,nodev,size={spec.tmp_mib}m,mode=1777",
        },
        "cap_drop": ["ALL"],
        "cap_add": ["KILL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": spec.pids,
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": int(spec.cpus * 1e9),
        "shm_size": 16 * MIB,
        "log_config": {"type": "none", "config": {}},
    }


class DockerSandbox(Sandbox):
    """A container of its own, started by `start` and removed by `stop`. Made by a `DockerProvider`."""

    kind: ClassVar[str] = "docker"

    def __init__(self, spec: SandboxSpec, daemon: DockerDaemon, owner: Owner, egress: Egress | None = None) -> None:
        super().__init__(spec)
        self._daemon = daemon
        self._owner = owner
        self._egress = egress
        self._name = f"sparring-{self.id}"
        self._created: asyncio.Future[None] | None = None
        self._running = False
        self._purge: asyncio.Task[None] | None = None
        self._processes: set[DockerProcess] = set()

    async def _start(self, timeout_s: float) -> None:
        volume = await self._egress.volume() if self._egress else None
        api = self._daemon.api

        def create_and_start() -> None:
            options = container_options(self.spec)
            if volume:
                options["binds"] = {volume: {"bind": Egress.FOLDER, "mode": "ro"}}
            api.create_container(
                self.spec.image or DEFAULT_IMAGE,
                list(CONTAINER_ARGV[1:]),
                entrypoint=list(CONTAINER_ARGV[:1]),
                name=self._name,
                user="0:0",
                working_dir=self.spec.workdir,
                environment=_ENV | (PROXY_ENV if volume else {}) | dict(self.spec.env),
                labels=labels(self._owner, self.spec.lifetime_s),
                host_config=api.create_host_config(**options),
            )
            api.start(self._name)

        self._created = self._daemon.submit(create_and_start)
        await self._daemon.result(self._created, timeout_s=timeout_s)
        self._running = True
        if self._egress:
            await self._egress.open_inside(self._name)

    async def _stop(self) -> bool:
        self._running = False
        for process in self._processes:
            process.abandon()
        if self._purge is not None:
            self._purge.cancel()
        if self._created is not None:
            # Removal is owed even if the caller is cancelled here.
            await asyncio.shield(asyncio.get_running_loop().create_task(self._remove(self._created)))
        return self._created is None

    async def _remove(self, created: asyncio.Future[None]) -> None:
        await asyncio.wait([created], timeout=60.0)  # a start that was given up goes on in its thread
        try:
            await self._daemon.call(
                lambda: self._daemon.api.remove_container(self._name, force=True, v=True), timeout_s=60.0
            )
        except ContainerGone:
            self._created = None
        except SandboxError:
            pass  # the daemon is gone; tried again when the provider closes, then the reaper's
        else:
            self._created = None
        finished = [process.finished for process in self._processes if not process.finished.done()]
        if finished:
            await asyncio.wait(finished, timeout=5.0)

    async def alive(self) -> bool:
        try:
            state = await self._daemon.call(lambda: self._daemon.api.inspect_container(self._name), timeout_s=10.0)
        except SandboxError:
            return False
        return self._running and bool(state["State"]["Running"])

    async def spawn(
        self,
        argv: Sequence[str],
        on_output: OnOutput,
        *,
        stdin: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> DockerProcess:
        if not self._running:
            raise SandboxError(f"{self} is not running; start it first")
        if self._purge is not None:
            await asyncio.wait([self._purge])
        try:
            process = await DockerProcess.spawn(
                self._daemon,
                self._name,
                in_folder(cwd, held_to(timeout_s, argv)),
                on_output,
                self._begin_purge,
                stdin=stdin,
                env=env or {},
                cwd=self.workdir,
                user=user or AGENT,
            )
        except ContainerGone as error:
            raise SandboxError(f"{self} is gone: {error}; was the daemon restarted?") from error
        self._processes.add(process)
        process.on_finished(self._processes.discard)
        return process

    async def clear(self) -> None:
        self._begin_purge()  # which the next `spawn` waits for

    def _begin_purge(self) -> None:
        if self._purge is None or self._purge.done():
            self._purge = asyncio.get_running_loop().create_task(self._kill_everything())

    async def _kill_everything(self) -> None:
        """End every process but the container's own. Sessions and commands that run beside it end too."""
        with contextlib.suppress(SandboxError, TimeoutError):  # a broken sandbox says so at the next command
            await self._daemon.call(lambda: self._daemon.api.kill(self._name, "SIGUSR1"), timeout_s=10.0)
            async with asyncio.timeout(_PURGE_S):
                while await self._processes_inside() > _OWN:  # noqa: ASYNC110  # the signal's work takes its time
                    await asyncio.sleep(0.02)
            if self._egress:
                await self._egress.open_inside(self._name)

    async def _processes_inside(self) -> int:
        return len((await self._daemon.call(lambda: self._daemon.api.top(self._name)))["Processes"])

    async def post_mortem(self, exit_code: int) -> bool:
        if exit_code == 137:
            await asyncio.sleep(0.1)  # a container that ends kills its commands a moment before the daemon knows
        return await super().post_mortem(exit_code)

    async def oom_kills(self) -> int:
        counters = ["cat", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]

        def count() -> int:
            created = self._daemon.api.exec_create(self._name, counters, stderr=False)
            found = re.findall(rb"oom_kill (\d+)", self._daemon.api.exec_start(created["Id"]))
            return sum(map(int, found))

        try:
            return await self._daemon.call(count, timeout_s=1.0)
        except SandboxError:
            return 0


class DockerProvider(SandboxProvider):
    """Sandboxes of one Docker daemon: `host`, else DOCKER_HOST, else the local socket.

    Opening reaps what dead runs left; so does closing, and the end of the interpreter removes what is still there.
    """

    kind: ClassVar[str] = "docker"

    def __init__(self, host: str | None = None, *, warm: int = 0) -> None:
        super().__init__(warm=warm)
        self.daemon = DockerDaemon(host)
        self._owner = Owner.current()
        self._egress: dict[tuple[str, ...], Egress] = {}

    async def open(self) -> None:
        await self.daemon.connect()
        await self.daemon.call(lambda: reap(self.daemon.api), timeout_s=120.0)
        _reap_at_exit(self.daemon.host, self._owner)

    def _make(self, spec: SandboxSpec) -> DockerSandbox:
        egress = None
        if spec.network:
            egress = self._egress.setdefault(spec.network, Egress(self.daemon, self._owner, spec.network))
        return DockerSandbox(spec, self.daemon, self._owner, egress)

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*(egress.close() for egress in self._egress.values()))
        self._egress.clear()
        await self.daemon.close()


_exit_hooks: set[tuple[str, Owner]] = set()


def _reap_at_exit(host: str, owner: Owner) -> None:
    """Once a process and daemon: at the interpreter's end, remove what this process still has there."""
    if (host, owner) in _exit_hooks:
        return
    _exit_hooks.add((host, owner))

    def at_exit() -> None:
        import docker
        import requests.exceptions

        if Owner.current() != owner:  # a fork that ends: the sandboxes are its parent's
            return
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException, OSError):
            api = docker.APIClient(base_url=host, version="auto", timeout=30)
            reap(api, lambda found: found.get(OWNER_LABEL) == str(owner))

    atexit.register(at_exit)
