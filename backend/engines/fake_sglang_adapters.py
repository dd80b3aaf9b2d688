"""SGLang's endpoints for adapters (LoRA), on an engine of ours that has one beside its model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from sparring.backend.engines.base import Engine
from sparring.backend.lora import read_adapter
from sparring.config import LoraConfig
from sparring.errors import ConfigError, EngineError

__all__ = ["AdapterEndpoints"]


class AdapterEndpoints:
    """Adapters by name, and which requests use which.

    The original computes several at once. Our engine has one, so requests of different names must not overlap, and one
    that would is refused.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lora: LoraConfig | None = getattr(getattr(engine, "options", None), "lora", None)
        self._adapters: dict[str, dict[str, Tensor]] = {}
        self._users: Counter[str | None] = Counter()
        self._active: str | None = None
        self._changing = asyncio.Condition()
        self.routes = (
            ("POST", "/load_lora_adapter", self._load),
            ("POST", "/unload_lora_adapter", self._unload),
            ("GET", "/v1/models", self._models),
        )

    @asynccontextmanager
    async def used(self, name: str | None) -> AsyncIterator[None]:
        """Sample with an adapter, or with the model alone.

        Raises:
            EngineError: there is no such adapter, or another is in use.
        """
        async with self._changing:
            if name is not None and name not in self._adapters:
                raise EngineError(f"The following requested LoRA adapters are not loaded: {name}")
            if name != self._active:
                await self._activate(name)
            self._users[name] += 1
        try:
            yield
        finally:
            async with self._changing:
                self._users[name] -= 1
                self._changing.notify_all()

    async def _activate(self, name: str | None) -> None:
        busy = [str(other) for other, users in self._users.items() if users]
        if busy:
            raise EngineError(f"requests with the adapter {busy[0]} are running: this stand-in has one at a time")
        if name is not None:
            tensors: Iterable[tuple[str, Tensor]] = self._adapters[name].items()
        else:
            tensors = ((n, torch.zeros_like(t)) for n, t in self._adapters[str(self._active)].items())
        await self._engine.update_weights(self._engine.version, list(tensors))
        self._active = name

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        if self._lora is None:
            return _answer("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self._adapters:
            return _answer(f"Failed to load LoRA adapter {name} because it is already loaded")
        try:
            config = json.loads((folder / "adapter_config.json").read_text())
            tensors = read_adapter(folder)
        except (OSError, ValueError, ConfigError) as error:
            return _answer(str(error))
        if (config["r"], config["lora_alpha"]) != (self._lora.rank, self._lora.alpha):
            return _answer(f"the rank and alpha of {name} are not those that this stand-in was started with")
        missing = [key for key in (k.replace("q_proj", "v_proj") for k in tensors) if key not in tensors]
        if missing:
            return _answer(repr(missing[0]))  # as the original, which stacks the two
        self._adapters[name] = {key: tensor for key, tensor in tensors.items() if self._adapts(key)}
        return _answer(None)

    def _adapts(self, key: str) -> bool:
        """Whether the engine's adapter is beside this layer too: it takes no other tensors."""
        assert self._lora is not None
        targets = self._lora.target_modules
        return targets == "all-linear" or key.split(".lora_")[0].rpartition(".")[2] in targets

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        async with self._changing:
            if name not in self._adapters:
                return _answer(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self._adapters)}")
            await self._changing.wait_for(lambda: not self._users[name])
            del self._adapters[name]
            if self._active == name:
                self._active = None
        return _answer(None)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in ("default", *self._adapters)]}


def _answer(error: str | None) -> Response:
    body = {"success": error is None, "error_message": error}
    return JSONResponse(body, status_code=200 if error is None else 400)
