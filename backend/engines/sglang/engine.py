"""The engine contract over one SGLang server."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparring.backend.engines.base import SamplingParams, WeightSource
from sparring.backend.engines.remote.engine import Call, RemoteEngine
from sparring.backend.engines.remote.reply import Leg, Reply
from sparring.backend.engines.sglang.adapter import AdapterLoader
from sparring.backend.engines.sglang.loader import WeightLoader
from sparring.backend.engines.sglang.options import WeightOptions
from sparring.backend.engines.sglang.protocol import (
    ServerInfo,
    check_sampling,
    generate_body,
    parse_reply,
    parse_server_info,
)
from sparring.backend.engines.sglang.verify import WeightsDiffer
from sparring.config import LoraConfig
from sparring.errors import EngineError

__all__ = ["SGLangEngine"]

_IDENTIFY_S = 30.0
_MEMORY_S = 300.0
_IDLE_S = 15.0
_HEALTH_S = 4.5  # an idle server answers at once; the front end of a busy one may take seconds


class SGLangEngine(RemoteEngine):
    """Samples from an SGLang server. One that `SGLangServer` started names each token's version (see `launcher`)."""

    kind = "SGLang"
    _info: ServerInfo

    def __init__(
        self,
        model_path: Path,
        *,
        weights: WeightOptions | None = None,
        lora: LoraConfig | None = None,
        **others: Any,
    ) -> None:
        """
        Args:
            weights: how new weights reach the server.
            lora: they are the tensors of such an adapter, which the server computes beside its model.
            others: as for any `RemoteEngine`.
        """
        super().__init__(model_path, **others)
        self._options, self._lora = weights or WeightOptions(), lora
        self._loader: WeightLoader | AdapterLoader | None = None
        self._lent = False

    async def stop(self) -> None:
        if self._loader is not None:
            await self._loader.close()
            self._loader = None
        await super().stop()

    async def resume(self) -> None:
        if self._lent:
            raise EngineError(
                f"the SGLang server at {self.url} gave its memory to the trainer and got no new weights since"
            )
        await super().resume()

    async def verify_weights(self) -> None:
        loader = self._loader
        if loader is None:
            return
        try:
            await self._died_or(loader.verify())
        except WeightsDiffer as error:
            self._failure = str(error)
            self._wake()
            raise

    async def release_memory(self) -> None:
        """Give the server's GPU memory to the trainer: weights, cache and graphs. It needs `--enable-memory-saver`.

        Requests wait from here on; the next `update_weights` takes the memory back, and `resume` lets them go on.

        Raises:
            EngineError: requests are running, or the server refused. (Asked while it is busy, it would die.)
        """
        self._check()
        if self._running:
            raise EngineError(f"{len(self._running)} requests run on {self.url}: its memory is given back between them")
        self._paused, self._paused_at = True, time.perf_counter()
        try:
            await self._control(f"/flush_cache?timeout={_IDLE_S:g}", {}, deadline_s=2 * _IDLE_S)  # fails until it idles
            await self._control("/release_memory_occupation", {}, deadline_s=_MEMORY_S)
        except BaseException:
            self._paused = False
            self._wake()
            raise
        self._lent = True

    async def _identify(self) -> int:
        model = await self._died_or(self._transport.get("/model_info", deadline_s=_IDENTIFY_S))
        server = await self._died_or(self._transport.get("/server_info", deadline_s=_IDENTIFY_S))
        self._info = info = parse_server_info(server, model, self.url)
        if info.architectures and self._layout.architecture not in info.architectures:
            raise EngineError(
                f"the SGLang server at {self.url} holds {info.architectures[0]} ({info.model_path}), but the model of "
                f"this run is {self._layout.architecture}: start the server with the same model"
            )
        if self._lora is not None:
            deadline_s = self._options.deadline_s
            self._loader = AdapterLoader(
                self._transport, self._layout, self._lora, salt=self._salt, deadline_s=deadline_s
            )
            return 0
        self._loader = WeightLoader(self._transport, info, self._layout, self._options)
        return info.weight_version

    async def _held(self) -> str:
        if isinstance(self._loader, AdapterLoader):
            return await self._loader.held(self.version, deadline_s=_HEALTH_S)
        model = await self._transport.get("/model_info", deadline_s=_HEALTH_S)
        return str(model.get("weight_version"))

    def _check_sampling(self, sampling: SamplingParams) -> None:
        check_sampling(sampling, self._info)

    def _ask(self, leg: Leg, *, stream: bool) -> Call:
        body = generate_body(leg, stream=stream)
        if isinstance(self._loader, AdapterLoader) and self._loader.current is not None:
            body["lora_path"] = self._loader.current
        return "/generate", body

    def _parse(self, data: Any, leg: Leg, before: Reply) -> Reply:
        reply = parse_reply(data, leg.sampling)  # its events are cumulative
        return reply if self._lora is None else replace(reply, versions=None)  # those are of the model, not the adapter

    def _abort(self, rid: str) -> Call:
        return "/abort_request", {"rid": rid}

    def _pause(self) -> Call:
        return "/pause_generation", {"mode": "in_place"}

    def _resume(self) -> Call:
        return "/continue_generation", {}

    async def _stage(self, version: int, source: WeightSource) -> Any:
        self._check()
        assert self._loader is not None
        return await self._loader.stage(version, source)

    async def _load(self, staged: Any, *, deadline_s: float) -> None:
        assert self._loader is not None
        if self._lent:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what the trainer's allocator keeps for later is what the server needs now
            await self._control("/resume_memory_occupation", {}, deadline_s=_MEMORY_S)
            self._lent = False
        await self._loader.load(staged)
