"""A small server that speaks SGLang's endpoints on an engine of ours: for tests, and for trying things without a GPU.

As a program it takes the arguments of `sglang.launch_server` that `SGLangServer` gives:
`python -m sparring.backend.engines.fake_sglang --model-path FOLDER --port N`.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sparring.backend.engines.base import Completion, Engine, SamplingParams
from sparring.backend.engines.fake_server import FakeServer, run_as_program
from sparring.backend.engines.fake_sglang_adapters import AdapterEndpoints
from sparring.backend.engines.fake_sglang_weights import WeightEndpoints
from sparring.errors import EngineError

__all__ = ["FakeSGLang"]


class FakeSGLang(FakeServer):
    """SGLang's HTTP face over `engine`, which is started and stopped with it.

    What differs from the original: memory that is shared is that of a CPU, and groups are gloo's.
    """

    def __init__(self, engine: Engine, model_path: Path, *, reports_versions: bool = True, seeds: bool = True) -> None:
        """
        Args:
            reports_versions: answer with the version of each token, and with checksums of the weights, as a server does
                that `launcher` started.
            seeds: claim deterministic inference.
        """
        super().__init__(engine, model_path, "SGLang's endpoints on an engine of sparring")
        self._reports_versions, self._seeds = reports_versions, seeds
        self.weights = WeightEndpoints(engine, model_path, tells=reports_versions)
        self._adapters = AdapterEndpoints(engine)
        self._lent = False
        self._route(
            (
                *self.weights.routes,
                *self._adapters.routes,
                ("GET", "/health", self._health),
                ("GET", "/health_generate", self._health),
                ("GET", "/model_info", self._model_info),
                ("GET", "/server_info", self._server_info),
                ("POST", "/generate", self._generate),
                ("POST", "/abort_request", self._abort_request),
                ("POST", "/pause_generation", self._pause),
                ("POST", "/continue_generation", self._continue),
                ("POST", "/flush_cache", self._flush),
                ("POST", "/release_memory_occupation", self._release_memory),
                ("POST", "/resume_memory_occupation", self._resume_memory),
            )
        )

    async def _model_info(self) -> dict[str, Any]:
        config = json.loads((self._model_path / "config.json").read_text())
        return {
            "model_path": str(self._model_path),
            "is_generation": True,
            "weight_version": self.weights.version,
            "model_type": config["model_type"],
            "architectures": config["architectures"],
        }

    async def _server_info(self) -> dict[str, Any]:
        return {
            "version": "0.5.17",
            "model_path": str(self._model_path),
            "enable_deterministic_inference": self._seeds,
            "skip_tokenizer_init": False,
            "base_gpu_id": 0,
            "tp_size": 1,
            "dtype": self.weights.dtype,
            "startup_time": self.weights.instance,
        }

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if "input_ids" not in body:
            return JSONResponse({"error": {"message": "input_ids are needed: text is not tokenised here"}}, 400)
        self.bodies.append(body)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        async with self._serving(body) as rid:
            return JSONResponse(self._finished(rid, body, await self._whole(rid, body["input_ids"], _sampling(body))))

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        try:
            async for event in self._replies(body):
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
        except EngineError as error:
            yield b"data: " + json.dumps({"error": {"message": str(error)}}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _replies(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Cumulative answers; the last has a finish reason."""
        async with self._serving(body) as rid:
            async for said in self._say(rid, body["input_ids"], _sampling(body)):
                yield self._finished(rid, body, said) if isinstance(said, Completion) else self._reply(rid, said, None)

    def _reply(self, rid: str, said: list[int], finish: dict[str, Any] | None, **meta: Any) -> dict[str, Any]:
        described = {"id": rid, "finish_reason": finish, "weight_version": self.weights.version, **meta}
        return {"text": "", "output_ids": list(said), "meta_info": described}

    def _finished(self, rid: str, body: Mapping[str, Any], completion: Completion) -> dict[str, Any]:
        finish: dict[str, Any] = {"type": "stop", "matched": completion.stop_string or completion.token_ids[-1:]}
        if completion.finish_reason == "length":
            finish = {"type": "length", "length": len(completion.token_ids)}
        elif completion.finish_reason == "aborted":
            finish = {"type": "abort", "message": "Aborted"}
        pairs = zip(completion.logprobs, completion.token_ids, strict=True)
        meta: dict[str, Any] = {"output_token_logprobs": [[logprob, token, None] for logprob, token in pairs]}
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = completion.logprobs
        if completion.top_logprobs is not None:
            meta["output_top_logprobs"] = [[[p, t, None] for t, p in entry] for entry in completion.top_logprobs]
        if self._reports_versions:
            meta["policy_versions"] = completion.policy_versions
        return self._reply(rid, completion.token_ids, finish, **meta)

    async def _abort_request(self, request: Request) -> Response:
        body = await request.json()
        await self._end(set(self._running) if body.get("abort_all") else {body["rid"]})
        return Response(status_code=200)

    async def _pause(self, request: Request) -> dict[str, str]:
        mode = (await request.json()).get("mode", "abort")
        await self._stop_decoding("abort" if mode == "abort" else "keep")
        return {"status": "ok", "message": "Generation paused successfully."}

    async def _continue(self) -> dict[str, str]:
        await self._go_on()
        return {"status": "ok", "message": "Generation continued successfully."}

    async def _flush(self) -> Response:
        return Response(status_code=400 if self._running else 200)  # our engines' caches know their weights

    async def _release_memory(self) -> None:
        if self._running:
            raise EngineError("requests are running: the original dies of that")
        self._lent = True

    async def _resume_memory(self) -> None:
        """Here as there, what comes back is no longer what was given."""
        await self.weights.blank()
        self._lent = False

    @asynccontextmanager
    async def _serving(self, body: Mapping[str, Any]) -> AsyncIterator[str]:
        """The model that a request asks for is in place; gives the request's id."""
        if self._lent:
            raise EngineError("the memory of the model was given back")
        rid = body.get("rid") or uuid.uuid4().hex
        async with self._adapters.used(body.get("lora_path")):
            with self._request(rid):
                yield rid


def _sampling(body: Mapping[str, Any]) -> SamplingParams:
    params = body["sampling_params"]
    top_k = params.get("top_k", -1)
    stop = params.get("stop") or ()
    return SamplingParams(
        max_new_tokens=params["max_new_tokens"],
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        top_k=top_k if 0 < top_k < 1 << 20 else 0,
        min_p=params.get("min_p", 0.0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        seed=params.get("sampling_seed"),
        top_logprobs=body.get("top_logprobs_num", 0),
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Speak SGLang's endpoints on the embedded engine.")
    arguments.add_argument("--model-path", dest="model", type=Path, required=True)
    arguments.add_argument("--context-length", dest="max_length", type=int, default=2048)
    arguments.add_argument("--max-running-requests", dest="slots", type=int, default=32)
    run_as_program(FakeSGLang, arguments)
