"""How new weights reach a server: what may be chosen, and what is chosen where nothing is said."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from sparring.errors import EngineError

if TYPE_CHECKING:
    import torch

    from sparring.backend.engines.sglang.protocol import ServerInfo

__all__ = ["Route", "WeightOptions", "choose_route"]

Route = Literal["ipc", "disk", "group"]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class WeightOptions:
    """
    Attributes:
        route: by handles to memory of the same GPU, through a folder, or by a process group; None chooses.
        bucket_bytes: most bytes of new weights that are staged at once; see `BucketStager` for what it trades.
        verify_every: of so many updates the first is followed by a look at what the server holds; 0: never.
        host: address of this machine at which a server meets the trainer in a group.
        deadline_s: of each bucket, and of opening a group.
    """

    route: Route | None = None
    bucket_bytes: int = 4 * 2**30
    verify_every: int = 10
    host: str = "127.0.0.1"
    deadline_s: float = 300.0


def choose_route(wanted: Route | None, device: torch.device, server: ServerInfo, url: str) -> Route:
    """The route of tensors on `device` to a server.

    Memory is shared with a server on the same GPU; another GPU gets broadcasts; from a CPU weights go through a folder
    in memory, or, to another machine, by broadcast. A server that lies on several GPUs takes broadcasts alone, since
    each of its ranks wants handles of its own.

    Raises:
        EngineError: the wanted route does not lead there.
    """
    here = urlsplit(url).hostname in (*_LOOPBACK, socket.gethostname())
    same_gpu = here and device.type == "cuda" and device.index == server.gpu
    if wanted is None:
        if same_gpu and server.ranks == 1:
            return "ipc"
        return "disk" if here and device.type == "cpu" else "group"
    if wanted == "ipc" and not here:
        raise EngineError(
            f"engine.weights=ipc shares memory, and the server at {url} is on another machine: set engine.weights=group"
        )
    if wanted == "ipc" and server.ranks > 1:
        raise EngineError(
            f"engine.weights=ipc has handles for one rank, and the server at {url} has {server.ranks}: "
            "set engine.weights=group"
        )
    return wanted
