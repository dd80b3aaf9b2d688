"""A process group of the trainer and one server, over which new weights are broadcast to other GPUs and machines."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from sparring.backend.engines.remote.transport import Transport
from sparring.errors import EngineError
from sparring.threads import in_daemon_thread

__all__ = ["WeightGroup"]

_POLL_S = 0.001
_GOODBYE_S = 5.0
_NCCL_PATIENCE = timedelta(hours=6)  # beyond every deadline of ours, which aborts it before


class WeightGroup:
    """Rank 0 of a group whose other ranks are those of one server.

    A group for each server, not one for all: SGLang waits in a collective without a deadline of its own, so in a common
    group a server that dies, or hangs, would take all the others with it. The price is that weights leave the trainer
    once for each server.

    Every wait here has a deadline. After a failure the group is of no use: `close` it and open another.
    """

    def __init__(self, name: str, store: dist.Store, backend: Any) -> None:
        self.name = name
        self._store: dist.Store | None = store
        self._backend = backend

    @classmethod
    async def open(
        cls, transport: Transport, *, host: str, device: torch.device, server_ranks: int, deadline_s: float
    ) -> WeightGroup:
        """Meet the server at a free port of `host`, an address of this machine that the server can reach.

        NCCL between GPUs, gloo from a CPU. NCCL makes its connection with the first broadcast.

        Raises:
            EngineError: they did not meet within `deadline_s` seconds.
        """
        kind: Literal["nccl", "gloo"] = "nccl" if device.type == "cuda" else "gloo"
        name, world = f"sparring-{uuid.uuid4().hex[:12]}", 1 + server_ranks
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise EngineError(
                f"cannot listen at {host} for the server at {transport.url}: {error}; set engine.group_host to an "
                "address of this machine that the server can reach"
            ) from error
        port: int = listener.getsockname()[1]
        patience = timedelta(seconds=deadline_s)
        store = dist.TCPStore(
            host, port, world, True, patience, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": name,
            "backend": kind,
        }
        joining = in_daemon_thread(lambda: _join(kind, name, store, world, host, patience), "sparring-group-join")
        asking = asyncio.ensure_future(transport.post("/init_weights_update_group", body, deadline_s=deadline_s))
        try:
            answer = await asking
            if not (answer or {}).get("success"):
                raise EngineError(f"the server at {transport.url} joined no group: {_message(answer)}")
            async with asyncio.timeout(deadline_s):
                return cls(name, store, await joining)
        except (TimeoutError, RuntimeError) as error:
            raise EngineError(
                f"the server at {transport.url} did not meet the trainer at {host}:{port} in {deadline_s:g} s: "
                f"{error}; set engine.group_host to an address of this machine that the server can reach"
            ) from error
        finally:
            asking.cancel()
            joining.cancel()

    async def broadcast(self, tensor: torch.Tensor, *, deadline_s: float) -> None:
        """Send a tensor to the server, which must be told to receive it.

        Raises:
            EngineError: it is not through within `deadline_s` seconds, or the other end is gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._backend.broadcast([tensor], options)
            async with asyncio.timeout(deadline_s):
                while not work.is_completed():  # noqa: ASYNC110  # neither library gives anything to await
                    await asyncio.sleep(_POLL_S)
            work.wait()
        except (TimeoutError, RuntimeError) as error:
            reason = f"no end after {deadline_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise EngineError(f"weights were not broadcast in the group {self.name}: {reason}") from error

    async def close(self, transport: Transport) -> None:
        """Leave, and tell the server to. Never fails: a server that is gone has left too."""
        with suppress(EngineError):
            await transport.post("/destroy_weights_update_group", {"group_name": self.name}, deadline_s=_GOODBYE_S)
        self.abandon()

    def abandon(self) -> None:
        """Leave without a word. What still runs in the group is aborted, or ends by its deadline."""
        parts: list[Any] = [self._backend, self._store]
        self._backend = self._store = None
        threading.Thread(target=_end, args=(parts,), name="sparring-group-end", daemon=True).start()


def _end(parts: list[Any]) -> None:
    """Drop the last references, which waits for what runs, in a thread that may."""
    with suppress(RuntimeError):  # gloo aborts nothing
        parts[0].abort()
    parts.clear()


def _join(
    kind: Literal["nccl", "gloo"], name: str, store: dist.Store, world: int, host: str, patience: timedelta
) -> Any:
    """Rank 0 as `torch.distributed.new_group` would make it, without touching the process's default group.

    The prefixes are those under which torch's `_new_process_group_helper`, which the server calls, finds the others.
    """
    device = "cuda" if kind == "nccl" else "cpu"
    prefixed = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if kind == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = _NCCL_PATIENCE
        with _nccl_errors_left_to_us():
            return dist.ProcessGroupNCCL(prefixed, 0, world, nccl)
    kind_of_group: Any = dist.ProcessGroupGloo  # its options are not in torch's types
    gloo = kind_of_group._Options()
    gloo._timeout = patience
    gloo._devices = [kind_of_group.create_device(hostname=host)]
    return kind_of_group(prefixed, 0, world, gloo)


@contextmanager
def _nccl_errors_left_to_us() -> Iterator[None]:
    """NCCL's watchdog ends the process when the other end is lost or late; the trainer is to live on without it."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"  # read as the group is made
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _message(answer: Any) -> str:
    return str(answer.get("message", answer) if isinstance(answer, dict) else answer)[:500]
