"""A small server that speaks vLLM's endpoints on an engine of ours: for tests, and for trying things without a GPU.

As a program it takes the arguments of `vllm` that `VLLMServer` gives:
`python -m sparring.backend.engines.fake_vllm serve FOLDER --port N`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sparring.backend.engines.base import Completion, Engine, SamplingParams
from sparring.backend.engines.fake_server import FakeServer, joined, run_as_program
from sparring.errors import EngineError

__all__ = ["FakeVLLM"]

_GUARDED = ("/v1", "/inference")  # what vLLM's key guards


class FakeVLLM(FakeServer):
    """vLLM's HTTP face over `engine`, which is started and stopped with it.

    What differs from the original: weights come from disk alone, since handles of CUDA memory need a GPU, and a label
    of weights that is set late holds for what they have sampled already.
    """

    def __init__(
        self,
        engine: Engine,
        model_path: Path,
        *,
        key: str | None = None,
        max_length: int | None = None,
        reports_versions: bool = True,
        processed_logprobs: bool = True,
        development: bool = True,
    ) -> None:
        """
        Args:
            key: the API key to ask for.
            max_length: the context length to tell of.
            reports_versions: answer with spans of weight versions, which came with vLLM 0.33.
            processed_logprobs: else alternatives that a cut took away seem possible, as with `raw_logprobs`.
            development: have the endpoints of `VLLM_SERVER_DEV_MODE=1`.
        """
        super().__init__(engine, model_path, "vLLM's endpoints on an engine of sparring")
        self._key, self._max_length = key, max_length
        self._reports_versions, self._processed = reports_versions, processed_logprobs
        self._labels = {0: "default"}  # by the engine's versions
        self.app.middleware("http")(self._authenticate)
        self._route(
            (
                ("GET", "/health", self._health),
                ("GET", "/version", self._version),
                ("GET", "/v1/models", self._models),
                ("POST", "/inference/v1/generate", self._generate),
                ("POST", "/inference/v1/abort_requests", self._abort_requests),
            )
        )
        if development:
            self._route(
                (
                    ("POST", "/pause", self._pause),
                    ("POST", "/resume", self._resume),
                    ("GET", "/weight_info", self._weight_info),
                    ("POST", "/update_weight_version", self._update_weight_version),
                    ("POST", "/collective_rpc", self._collective_rpc),
                    ("POST", "/init_weight_transfer_engine", self._no_transfer),
                )
            )

    async def _authenticate(self, request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("Authorization")
        if self._key and request.url.path.startswith(_GUARDED) and given != f"Bearer {self._key}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return await go_on(request)

    async def _version(self) -> dict[str, str]:
        return {"version": "0.33.0"}

    async def _models(self) -> dict[str, Any]:
        card = {"id": str(self._model_path), "root": str(self._model_path), "max_model_len": self._max_length}
        return {"object": "list", "data": [card]}

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        with self._request(rid := _rid(body)):
            said = await self._whole(rid, body["token_ids"], _sampling(body))
        return JSONResponse(self._answer(rid, self._choice(said) | self._end_of(said)))

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        with self._request(rid := _rid(body)):
            try:
                async for choice in self._choices(rid, body["token_ids"], _sampling(body)):
                    yield _event(self._answer(rid, choice))
            except EngineError as error:
                yield _event({"error": {"message": str(error)}})
        yield b"data: [DONE]\n\n"

    async def _choices(self, rid: str, prompt: list[int], sampling: SamplingParams) -> AsyncIterator[dict[str, Any]]:
        """Each token at once with its log-probability: our engines give those at the end, so ask for one token a time.

        A stop string spans tokens, so there the whole answer is one event, as with a large `--stream-interval`.
        """
        step = sampling if sampling.stop else replace(sampling, max_new_tokens=1)
        said = Completion([], [], [], "length", None, [] if sampling.top_logprobs else None)
        while True:
            seed = None if sampling.seed is None else sampling.seed + len(said.token_ids)
            more = await self._whole(rid, [*prompt, *said.token_ids], replace(step, seed=seed))
            said = joined(said, more)
            if said.finish_reason != "length" or len(said.token_ids) == sampling.max_new_tokens:
                yield self._choice(more) | self._end_of(said)
                return
            yield self._choice(more)

    def _answer(self, rid: str, choice: dict[str, Any]) -> dict[str, Any]:
        return {"request_id": rid, "output_mode": "tokens", "choices": [{"index": 0, **choice}]}

    def _choice(self, said: Completion) -> dict[str, Any]:
        tops = said.top_logprobs or [[] for _ in said.token_ids]
        content = [
            {"token_id": token, "logprob": logprob, "top_logprobs": self._alternatives(token, logprob, top)}
            for token, logprob, top in zip(said.token_ids, said.logprobs, tops, strict=True)
        ]
        return {"token_ids": said.token_ids, "logprobs": {"content": content}, "finish_reason": None}

    def _alternatives(self, token: int, logprob: float, top: list[tuple[int, float]]) -> list[dict[str, Any]]:
        """The sampled token first, wherever it ranks."""
        others = [(other, p) for other, p in top if other != token]
        if not self._processed:
            others.append((token + 1, logprob - 1))
        return [{"token_id": each, "logprob": max(p, -9999.0)} for each, p in [(token, logprob), *others]]

    def _end_of(self, said: Completion) -> dict[str, Any]:
        reason = "abort" if said.finish_reason == "aborted" else said.finish_reason
        end: dict[str, Any] = {"finish_reason": reason, "stop_reason": said.stop_string}
        if self._reports_versions:
            end["weight_versions"] = self._spans(said.policy_versions)
        return end

    def _spans(self, versions: list[int]) -> list[dict[str, Any]]:
        spans, start = [], 0
        for version, tokens in itertools.groupby(versions):
            end = start + len(list(tokens))
            spans.append({"version": self._labels[version], "start": start, "end": end})
            start = end
        return spans

    async def _abort_requests(self, request: Request) -> Response:
        await self._end((await request.json())["request_ids"])
        return Response(status_code=200)

    async def _pause(self, mode: str = "abort") -> dict[str, str]:
        await self._stop_decoding("keep" if mode == "keep" else "abort")
        return {"status": "paused"}

    async def _resume(self) -> dict[str, str]:
        await self._go_on()
        return {"status": "resumed"}

    async def _weight_info(self) -> dict[str, str]:
        return {"weight_version": self._labels[self._engine.version]}

    async def _update_weight_version(self, request: Request) -> dict[str, Any]:
        label = (await request.json())["new_version"]
        self._labels[self._engine.version] = label
        return {"success": True, "new_version": label}

    async def _collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        if body["method"] != "reload_weights":
            return JSONResponse({"error": {"message": f"no worker has a method {body['method']!r}"}}, status_code=500)
        before, after = self._engine.version, max(self._labels) + 1
        self._labels[after] = self._labels[before]
        await self._engine.update_weights(after, Path(body["kwargs"]["weights_path"]))
        return JSONResponse({"results": [None]})

    async def _no_transfer(self) -> Response:
        message = "handles of CUDA memory need a GPU: this is sparring's stand-in for vLLM"
        return JSONResponse({"error": {"message": message}}, status_code=500)


def _rid(body: Mapping[str, Any]) -> str:
    return f"generate-tokens-{body.get('request_id') or uuid.uuid4().hex}"


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _sampling(body: Mapping[str, Any]) -> SamplingParams:
    params = body["sampling_params"]
    return SamplingParams(
        max_new_tokens=params.get("max_tokens", 16),
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        top_k=params.get("top_k", 0),
        min_p=params.get("min_p", 0.0),
        stop=tuple(params.get("stop") or ()),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        seed=params.get("seed"),
        top_logprobs=params.get("logprobs") or 0,
    )


def _make(engine: Engine, model: Path) -> FakeVLLM:
    return FakeVLLM(engine, model, key=os.environ.get("VLLM_API_KEY"))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Speak vLLM's endpoints on the embedded engine.")
    arguments.add_argument("command", choices=["serve"])
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--max-model-len", dest="max_length", type=int, default=2048)
    arguments.add_argument("--max-num-seqs", dest="slots", type=int, default=32)
    run_as_program(_make, arguments)
