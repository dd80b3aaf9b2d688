"""Brings one SGLang server its weights, version after version.

`stage` copies (and converts, checks, writes) while requests run; `load` tells the server to read, while it stands
still; `verify` asks it, when it decodes again, whether it holds what was sent.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from sparring.backend.engines.base import WeightSource
from sparring.backend.engines.remote.folder import write_folder
from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.transport import Transport
from sparring.backend.engines.sglang.buckets import Bucket, BucketStager
from sparring.backend.engines.sglang.group import WeightGroup
from sparring.backend.engines.sglang.handles import handles
from sparring.backend.engines.sglang.options import Route, WeightOptions, choose_route
from sparring.backend.engines.sglang.protocol import ServerInfo
from sparring.backend.engines.sglang.verify import (
    CannotTell,
    Checksums,
    WeightsDiffer,
    compare,
    folder_checksums,
    held_checksums,
)
from sparring.errors import EngineError

__all__ = ["StagedWeights", "WeightLoader"]

# Bytes. What a device's copy engines and kernels like; a flattened bucket has no room between its tensors.
_ALIGNMENT = {"ipc": 256, "group": 1}
_GROUP_S = 60.0  # to meet, and for each broadcast: a server that hangs is not waited for as long as one that reads
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A bucket, and how the server opens it where it shares our memory."""

    bucket: Bucket
    handles: str | None


@dataclass(eq=False)
class StagedWeights:
    """Weights of one version in place for the server: the first piece, or all in a folder (ours to remove, or not).

    Attributes:
        loaded: once; a folder of ours is gone by then.
    """

    version: int
    route: Route
    piece: _Piece | None = None
    folder: Path | None = None
    checksums: Checksums = field(default_factory=dict)
    loaded: bool = False
    _owned: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)


class WeightLoader:
    """See the module. Buffers and the process group are kept from version to version; `close` ends them."""

    def __init__(self, transport: Transport, server: ServerInfo, layout: WeightLayout, options: WeightOptions) -> None:
        self._transport, self._server, self._options = transport, server, options
        self._layout = replace(layout, dtype=server.dtype or layout.dtype)
        self._stagers: dict[Route, BucketStager] = {}
        self._group: WeightGroup | None = None
        self._instance: object = None  # of the server, when the group was opened
        self._updates = 0
        self._sent: Checksums = {}
        self._warned: set[str] = set()

    async def stage(self, version: int, source: WeightSource) -> StagedWeights:
        """Copy the first bucket of `source`, or all of it, to where the server can load it from, in the served type.

        A bucket is ours, and the trainer may go on changing its tensors; what is left of a larger model is read in
        `load`. A folder is the server's to read, and must be there on its machine.

        Raises:
            EngineError: names or shapes do not fit the model, no way leads to the server, or no group was formed.
        """
        due = bool(self._options.verify_every) and self._updates % self._options.verify_every == 0
        if isinstance(source, Path):
            self._layout.check(WeightLayout.of_model(source).shapes)
            return await self._in_folder(StagedWeights(version, "disk", folder=source), due)
        named = iter(source)
        head = next(named, None)
        if head is None:
            raise EngineError("the new weights hold no tensor at all")
        device, named = head[1].device, chain([head], named)
        route = choose_route(self._options.route, device, self._server, self._transport.url)
        if route == "disk":
            owned = await asyncio.to_thread(self._write, version, named)
            staged = StagedWeights(version, route, folder=Path(owned.name), _owned=owned)
            return await self._in_folder(staged, due)
        stager = self._stagers.get(route)
        if stager is None:
            limit = self._options.bucket_bytes
            stager = self._stagers[route] = BucketStager(self._layout, limit, alignment=_ALIGNMENT[route])
        piece = await asyncio.to_thread(_taken, route, lambda: stager.first(named, checksums=due))
        if route == "group":
            await self._meet(device)
        return StagedWeights(version, route, piece=piece)

    async def load(self, staged: StagedWeights) -> None:
        """Have the server read what was staged, and what comes after it. The prefix cache is not flushed: a flush with
        requests pending kills the server.

        Raises:
            EngineError: the server could not, or not in time. Then it may hold some tensors of either version.
        """
        if staged.folder is not None:
            await self._post("/update_weights_from_disk", {"model_path": str(staged.folder)}, staged, last=True)
            self._sent = staged.checksums
        else:
            await self._load_pieces(staged)
        staged.loaded = True
        self._updates += 1
        if staged._owned is not None:
            await asyncio.to_thread(staged._owned.cleanup)

    async def verify(self) -> None:
        """Compare what the server holds with what it was sent last, where that was to be verified.

        Raises:
            WeightsDiffer: it names the parameters and the server.
        """
        sent, self._sent = self._sent, {}
        if not sent:
            return
        url = self._transport.url
        try:
            if self._server.ranks > 1:
                raise CannotTell("it has several ranks, each with a part of them")
            held = await held_checksums(self._transport, deadline_s=self._options.deadline_s)
        except CannotTell as reason:
            self._warn(f"new weights on the SGLang server at {url} are not verified: {reason}")
            return
        found = compare(sent, held)
        if found.wrong:
            names = ", ".join(found.wrong[:3]) + (f" and {len(found.wrong) - 3} more" if len(found.wrong) > 3 else "")
            raise WeightsDiffer(
                f"the SGLang server at {url} does not hold the weights that it was sent: {names} differ(s), of "
                f"{len(sent) - len(found.unknown)} parameters compared. Nothing more is sampled from it: restart it, "
                "and look for faulty memory, or another program that updates it (engine.verify_weights=0 never asks)"
            )
        if found.unknown:
            self._warn(f"{len(found.unknown)} of {len(sent)} parameters on the SGLang server at {url}, such as "
                       f"{found.unknown[0]}, are not verified: it holds them in another form")  # fmt: skip

    async def close(self) -> None:
        self._stagers.clear()
        group, self._group = self._group, None
        if group is not None:
            await group.close(self._transport)

    def _write(self, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> tempfile.TemporaryDirectory[str]:
        tied = self._layout.tied
        given = [(name, tensor.detach()) for name, tensor in named if not (tied and name == "lm_head.weight")]
        self._layout.check({name: tuple(tensor.shape) for name, tensor in given})
        return write_folder(version, given, self._layout)

    async def _in_folder(self, staged: StagedWeights, due: bool) -> StagedWeights:
        assert staged.folder is not None
        if due:
            staged.checksums = await asyncio.to_thread(folder_checksums, staged.folder, self._layout)
        return staged

    async def _load_pieces(self, staged: StagedWeights) -> None:
        """Each piece while the next is staged into the other buffer."""
        stager, piece = self._stagers[staged.route], staged.piece
        try:
            while piece is not None:
                following = self._following(staged.route, stager, piece)
                sent, taken = await asyncio.gather(self._send(staged, piece), following, return_exceptions=True)
                for outcome in (sent, taken):
                    if isinstance(outcome, BaseException):
                        raise outcome
                piece = taken if isinstance(taken, _Piece) else None
        except EngineError as error:
            self._abandon_group()
            raise EngineError(
                f"{error}. The SGLang server at {self._transport.url} may hold a part of weights {staged.version} now, "
                "until an update succeeds"
            ) from error
        except BaseException:
            self._abandon_group()
            raise
        self._sent = stager.checksums

    async def _following(self, route: Route, stager: BucketStager, piece: _Piece) -> _Piece | None:
        return None if piece.bucket.last else await asyncio.to_thread(_taken, route, stager.following)

    async def _send(self, staged: StagedWeights, piece: _Piece) -> None:
        bucket = piece.bucket
        if piece.handles is not None:
            handed = {"serialized_named_tensors": [piece.handles]}
            await self._post("/update_weights_from_tensor", handed, staged, last=bucket.last)
            return
        assert self._group is not None
        body: dict[str, Any] = {
            "names": [name for name, _ in bucket.views],
            "dtypes": [self._layout.dtype] * len(bucket.views),
            "shapes": [list(view.shape) for _, view in bucket.views],
            "group_name": self._group.name,
            "load_format": "flattened_bucket",
        }
        told = asyncio.ensure_future(self._post("/update_weights_from_distributed", body, staged, last=bucket.last))
        deadline_s = min(_GROUP_S, self._options.deadline_s)
        cast = asyncio.ensure_future(self._group.broadcast(bucket.buffer, deadline_s=deadline_s))
        try:
            await asyncio.gather(told, cast)
        finally:
            told.cancel()
            cast.cancel()

    async def _post(self, path: str, body: dict[str, Any], staged: StagedWeights, *, last: bool) -> None:
        """The version goes with the last piece alone: before it the server holds some tensors of either."""
        body |= {"flush_cache": False} | ({"weight_version": str(staged.version)} if last else {})
        answer = await self._transport.post(path, body, deadline_s=self._options.deadline_s)
        if not isinstance(answer, dict) or not answer.get("success"):
            said = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise EngineError(
                f"the SGLang server at {self._transport.url} did not load weights {staged.version}: {str(said)[:1000]}"
            )

    async def _meet(self, device: torch.device) -> None:
        """Make sure of a group with the server that runs now: to one that was restarted ours would be unknown, and a
        broadcast in it would kill it."""
        deadline_s = min(_GROUP_S, self._options.deadline_s)
        server = await self._transport.get("/server_info", deadline_s=deadline_s)
        instance = server.get("startup_time")
        if self._group is not None and (instance is None or instance != self._instance):
            await self._group.close(self._transport)
            self._group = None
        if self._group is None:
            self._group = await WeightGroup.open(
                self._transport,
                host=self._options.host,
                device=device,
                server_ranks=self._server.ranks,
                deadline_s=deadline_s,
            )
            self._instance = instance

    def _abandon_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abandon()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text)


def _taken(route: Route, take: Callable[[], Bucket]) -> _Piece:
    bucket = take()
    return _Piece(bucket, handles(bucket.views) if route == "ipc" else None)
