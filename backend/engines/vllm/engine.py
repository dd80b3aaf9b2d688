"""The engine contract over one vLLM server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sparring.backend.engines.base import SamplingParams, WeightSource
from sparring.backend.engines.remote.engine import Call, RemoteEngine
from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.reply import Leg, Reply, refusal
from sparring.backend.engines.vllm.protocol import generate_body, parse_answer, request_id, version_of
from sparring.backend.engines.vllm.weights import StagedWeights, load_calls, stage
from sparring.errors import EngineError

__all__ = ["VLLMEngine"]

_IDENTIFY_S = 30.0
_HEALTH_S = 4.5  # an idle server answers at once; the front end of a busy one may take seconds
_ROUNDING = 1e-3
_HOW_TO_START = (
    "start vLLM 0.33 or later with VLLM_SERVER_DEV_MODE=1 in its environment, and with --enable-scale-out "
    "--logprobs-mode processed_logprobs"
)


class VLLMEngine(RemoteEngine):
    """Samples from a vLLM server, through `/inference/v1/generate`.

    Requests live through an update: the server says of each token which label its weights had, and we label them with
    our versions. A seed makes a generator of the request's own; that it repeats beside other requests takes a server
    with VLLM_BATCH_INVARIANT=1, which `engine.deterministic` sets.
    """

    kind = "vLLM"

    async def _identify(self) -> int:
        server = await self._died_or(self._transport.get("/version", deadline_s=_IDENTIFY_S))
        if "version" not in server:
            raise EngineError(
                f"what answers at {self.url} is not a vLLM server (no version in its /version): check the port"
            )
        models = await self._died_or(self._transport.get("/v1/models", deadline_s=_IDENTIFY_S))
        for model in models.get("data") or ():
            self._check_model(model)
        weights = await self._died_or(self._transport.get("/weight_info", deadline_s=_IDENTIFY_S))
        if "weight_version" not in weights:
            raise EngineError(
                f"the vLLM {server['version']} at {self.url} does not let its weights be changed: {_HOW_TO_START}"
            )
        return version_of(str(weights["weight_version"]))

    def _check_model(self, model: dict[str, Any]) -> None:
        length, root = model.get("max_model_len"), Path(model.get("root") or "")
        if length is not None and length < self._max_length:
            raise EngineError(
                f"the vLLM server at {self.url} has a context of {length} tokens, less than model.max_length="
                f"{self._max_length}: start it with --max-model-len {self._max_length}, or lower that"
            )
        if not (root / "config.json").is_file():
            return  # a name of the hub, or a folder of the server's own machine
        held = WeightLayout.of_model(root)
        if held.architecture != self._layout.architecture or held.shapes != self._layout.shapes:
            raise EngineError(
                f"the vLLM server at {self.url} holds {held.architecture} of {held.parameters:,} parameters ({root}), "
                f"but the model of this run is {self._layout.architecture} of {self._layout.parameters:,}: start the "
                "server with the same model"
            )

    async def _probe(self) -> None:
        """Ask for a token without alternatives: a server that reports one, or no logarithm, tells of something else."""
        only = SamplingParams(max_new_tokens=1, top_k=1, top_logprobs=2)
        probe = await self.generate([0], only)
        if not probe.token_ids:
            raise EngineError(f"the vLLM server at {self.url} sampled nothing when asked for one token")
        if len((probe.top_logprobs or [[]])[0]) > 1 or probe.logprobs[0] > _ROUNDING:
            raise EngineError(
                f"the vLLM server at {self.url} reports log-probabilities of another distribution than it samples "
                f"from: {_HOW_TO_START}"
            )

    async def _held(self) -> str:
        answer = await self._transport.get("/weight_info", deadline_s=_HEALTH_S)
        if "weight_version" not in answer:
            raise EngineError(f"the vLLM server at {self.url} is not well: {refusal(answer) or answer}")
        return str(answer["weight_version"])

    def _ask(self, leg: Leg, *, stream: bool) -> Call:
        return "/inference/v1/generate", generate_body(leg, stream=stream)

    def _parse(self, data: Any, leg: Leg, before: Reply) -> Reply:
        return parse_answer(data, leg, before)

    def _abort(self, rid: str) -> Call:
        return "/inference/v1/abort_requests", {"request_ids": [request_id(rid)]}

    def _pause(self) -> Call:
        return "/pause?mode=keep&clear_cache=false", {}  # the salt keeps cached prefixes of other weights apart

    def _resume(self) -> Call:
        return "/resume", {}

    async def _stage(self, version: int, source: WeightSource) -> StagedWeights:
        return await stage(version, source, self._layout, self._staged)

    async def _load(self, staged: StagedWeights, *, deadline_s: float) -> None:
        if staged.copies is not None:  # each time, since it may have restarted; a server that lacks it refuses here
            await self._control("/init_weight_transfer_engine", {"init_info": {"packed": False}})
        try:
            for path, body in load_calls(staged):
                await self._control(path, body, deadline_s=deadline_s)
        except EngineError as error:
            raise EngineError(f"{error}; the server may now hold weights of two versions: restart it") from error
        staged.loaded = True
        if staged.owned is not None:
            await asyncio.to_thread(staged.owned.cleanup)
