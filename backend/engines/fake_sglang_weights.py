"""SGLang's endpoints for weights, on an engine of ours: they change what it samples from, in part or whole."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d

from sparring.backend.engines.base import Engine
from sparring.backend.engines.sglang.checksum import ACTION, parameter_checksums
from sparring.errors import EngineError

__all__ = ["WeightEndpoints"]

_GROUP_TIMEOUT = timedelta(minutes=10)
_STACKED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
_VOCABULARY_MULTIPLE = 64


class WeightEndpoints:
    """What the server holds, and the ways to change it.

    As in the original: a name that it does not know is passed over in silence, an update may be of some tensors alone,
    and the version is the caller's word.

    Attributes:
        version: of the weights, as the last update that named one called it.
        instance: of this server, as its `startup_time` tells it from one that was started later at the same address.
    """

    def __init__(self, engine: Engine, model_path: Path, *, tells: bool) -> None:
        """
        Args:
            tells: answer for checksums, as a server does that `launcher` started.
        """
        self._engine, self._model_path, self._tells = engine, model_path, tells
        config = json.loads((model_path / "config.json").read_text())
        options = getattr(engine, "options", None)  # of an engine with a model; a scripted one has none
        self.dtype = str(options.dtype if options is not None else config.get("dtype") or "bfloat16")
        self.version = "default"
        self.instance = {"id": uuid.uuid4().hex}
        self._tensors: dict[str, Tensor] = {}
        self._groups: dict[str, Any] = {}
        self.routes = (
            ("POST", "/update_weights_from_disk", self._from_disk),
            ("POST", "/update_weights_from_tensor", self._from_tensor),
            ("POST", "/update_weights_from_distributed", self._from_distributed),
            ("POST", "/init_weights_update_group", self._join_group),
            ("POST", "/destroy_weights_update_group", self._leave_group),
            ("POST", "/weights_checker", self._check),
        )

    async def take(self, named: Mapping[str, Tensor], version: str | None) -> None:
        """Put tensors in the place of those of the same names.

        Raises:
            EngineError: the engine cannot take them.
        """
        held = await self._held()
        self._tensors = held | {name: tensor.to(held[name].dtype) for name, tensor in named.items() if name in held}
        await self._engine.update_weights(self._number(version), list(self._tensors.items()))
        self._name(version)

    async def blank(self) -> None:
        """Hold nothing but zeros, as memory does that was given back and taken again."""
        await self.take({name: torch.zeros_like(tensor) for name, tensor in (await self._held()).items()}, None)

    async def _held(self) -> dict[str, Tensor]:
        if not self._tensors:
            self._tensors = await asyncio.to_thread(self._read, self._model_path)
        return self._tensors

    def _read(self, folder: Path) -> dict[str, Tensor]:
        kind = getattr(torch, self.dtype)
        files = sorted(folder.glob("*.safetensors"))
        return {name: tensor.to(kind) for file in files for name, tensor in load_file(file).items()}

    def _number(self, version: str | None) -> int:
        if version is None:
            return self._engine.version
        return int(version) if version.isdecimal() else 0

    def _name(self, version: str | None) -> None:
        if version is not None:
            self.version = version

    async def _from_disk(self, request: Request) -> Response:
        body = await request.json()
        folder, version = Path(body["model_path"]), body.get("weight_version")
        try:
            await self._engine.update_weights(self._number(version), folder)
        except EngineError as error:
            return _answer(False, str(error))
        held = await self._held()
        read = await asyncio.to_thread(self._read, folder)
        self._tensors = held | {name: tensor for name, tensor in read.items() if name in held}
        self._name(version)
        return _answer(True, "Succeeded to update model weights.")

    async def _from_tensor(self, request: Request) -> Response:
        body = await request.json()
        try:
            shared = _TensorUnpickler.load_named(base64.b64decode(body["serialized_named_tensors"][0]))
            await self.take({name: tensor.clone() for name, tensor in shared}, body.get("weight_version"))
        except (EngineError, pickle.UnpicklingError, RuntimeError) as error:
            return _answer(False, str(error))
        return _answer(True, "Success")

    async def _join_group(self, request: Request) -> Response:
        body = await request.json()
        try:
            self._groups[body["group_name"]] = await asyncio.to_thread(_join, body)
        except (RuntimeError, ValueError) as error:
            return _answer(False, f"Failed to initialize custom process group: {error}.")
        return _answer(True, "Succeeded to initialize custom process group.")

    async def _leave_group(self, request: Request) -> Response:
        group = self._groups.pop((await request.json())["group_name"], None)
        if group is None:
            return _answer(False, "The group to be destroyed does not exist.")
        await asyncio.to_thread(dist.destroy_process_group, group)
        return _answer(True, "Succeeded to destroy custom process group.")

    async def _from_distributed(self, request: Request) -> Response:
        body = await request.json()
        group = self._groups.get(body["group_name"])
        if group is None or body.get("load_format") != "flattened_bucket":
            return _answer(False, "there is no such group, of which the original dies, or the tensors come one by one")
        kinds = [getattr(torch, kind) for kind in body["dtypes"]]
        try:
            named = await asyncio.to_thread(_receive, group, body["names"], kinds, body["shapes"])
            await self.take(named, body.get("weight_version"))
        except (EngineError, RuntimeError) as error:
            return _answer(False, f"Failed to update parameter online: {error}.")
        return _answer(True, "Succeeded to update parameter online.")

    async def _check(self, request: Request) -> Response:
        action = (await request.json()).get("action", "checksum")
        if not self._tells or action != ACTION:
            return _answer(False, f"Unsupported action={action!r}")
        held = _as_sglang_holds_them(await self._held())
        return _answer(True, json.dumps(await asyncio.to_thread(parameter_checksums, held.items())))


class _TensorUnpickler(pickle.Unpickler):
    """Opens handles to tensors, and nothing else that a pickle may ask for."""

    _ALLOWED: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {
            ("torch.multiprocessing.reductions", "rebuild_tensor"),
            ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
            ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
            ("torch.storage", "UntypedStorage"),
            ("torch.storage", "TypedStorage"),
            ("torch._utils", "_rebuild_tensor"),
            ("torch", "Tensor"),
            ("torch", "Size"),
            *(("torch", kind) for kind in ("float32", "bfloat16", "float16", "uint8")),
        }
    )

    @classmethod
    def load_named(cls, pickled: bytes) -> Sequence[tuple[str, Tensor]]:
        named: list[tuple[str, Tensor]] = cls(io.BytesIO(pickled)).load()
        return named

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a handle to a tensor in this machine's memory")
        return super().find_class(module, name)


def _join(body: Mapping[str, Any]) -> Any:
    """A group of its own beside whatever groups there are, by torch's helper, as the original makes it."""
    name, world = body["group_name"], body["world_size"]
    store = dist.TCPStore(body["master_address"], body["master_port"], world, False, _GROUP_TIMEOUT)
    group, _ = distributed_c10d._new_process_group_helper(
        world,
        body["rank_offset"],
        [],
        distributed_c10d.Backend(body["backend"]),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=_GROUP_TIMEOUT,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def _receive(
    group: Any, names: Sequence[str], kinds: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """The tensors of one flattened bucket: bytes behind each other, without room between them."""
    sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=group)
    parts = zip(names, flat.split(sizes), kinds, shapes, strict=True)
    return {name: part.clone().view(kind).view(shape) for name, part, kind, shape in parts}


def _as_sglang_holds_them(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Projections stacked, vocabularies filled up with zeros."""
    held = dict(tensors)
    for stacked, parts in _STACKED:
        for name in [name for name in held if f".{parts[0]}." in name]:
            found = [held.pop(name.replace(f".{parts[0]}.", f".{part}.")) for part in parts]
            held[name.replace(f".{parts[0]}.", f".{stacked}.")] = torch.cat(found)
    for name in [name for name in held if name.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        missing = -len(held[name]) % _VOCABULARY_MULTIPLE
        held[name] = torch.cat([held[name], held[name].new_zeros(missing, held[name].shape[1])])
    return held


def _answer(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, status_code=200 if success else 400)
