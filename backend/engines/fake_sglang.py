"""A small server that speaks SGLang's endpoints on an engine of ours: for tests, and for trying things without a GPU.

As a program it takes the arguments of `sglang.launch_server` that `SGLangServer` gives:
`python -m sparring.backend.engines.fake_sglang --model-path FOLDER --port N`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sparring.backend.engines.base import Completion, Engine, SamplingParams
from sparring.errors import EngineError

__all__ = ["FakeSGLang"]

_KEEPALIVE_S = 5  # SGLang's own


class FakeSGLang:
    """SGLang's HTTP face over `engine`, which is started and stopped with it.

    What differs from the original: weights come from disk alone, since handles of CUDA memory need a GPU.

    Attributes:
        bodies: every `/generate` request, in order, for tests that ask what was sent.
    """

    def __init__(self, engine: Engine, model_path: Path, *, reports_versions: bool = True, seeds: bool = True) -> None:
        """
        Args:
            reports_versions: answer with the version of each token, as a server does that `launcher` started.
            seeds: claim deterministic inference.
        """
        self._engine, self._model_path = engine, model_path
        self._reports_versions, self._seeds = reports_versions, seeds
        self._weight_version = "default"
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._paused = False
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI(title="SGLang's endpoints on an engine of sparring")
        for method, path, endpoint in (
            ("GET", "/health", self._health),
            ("GET", "/health_generate", self._health),
            ("GET", "/model_info", self._model_info),
            ("GET", "/server_info", self._server_info),
            ("POST", "/generate", self._generate),
            ("POST", "/abort_request", self._abort_request),
            ("POST", "/pause_generation", self._pause),
            ("POST", "/continue_generation", self._continue),
            ("POST", "/update_weights_from_disk", self._update_from_disk),
            ("POST", "/update_weights_from_tensor", self._update_from_tensor),
            ("POST", "/flush_cache", self._health),
        ):
            self.app.add_api_route(path, endpoint, methods=[method], response_model=None)
        self.app.add_exception_handler(EngineError, self._refuse)

    @asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Start the engine, listen, and give the URL."""
        config = uvicorn.Config(
            self.app, host=host, port=port, log_level="warning", timeout_keep_alive=_KEEPALIVE_S, lifespan="off"
        )
        server = uvicorn.Server(config)
        await self._engine.start()
        serving = asyncio.create_task(server._serve())
        try:
            while not server.started:
                if serving.done():
                    serving.result()
                await asyncio.sleep(0.005)
            bound = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://{host}:{bound}"
        finally:
            server.should_exit = server.force_exit = True
            await serving
            await self._engine.stop()

    async def _health(self) -> Response:
        return Response(status_code=200)

    async def _model_info(self) -> dict[str, Any]:
        config = json.loads((self._model_path / "config.json").read_text())
        return {
            "model_path": str(self._model_path),
            "is_generation": True,
            "weight_version": self._weight_version,
            "model_type": config["model_type"],
            "architectures": config["architectures"],
        }

    async def _server_info(self) -> dict[str, Any]:
        return {
            "version": "0.5.17",
            "model_path": str(self._model_path),
            "enable_deterministic_inference": self._seeds,
            "skip_tokenizer_init": False,
        }

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if "input_ids" not in body:
            return JSONResponse({"error": {"message": "input_ids are needed: text is not tokenised here"}}, 400)
        self.bodies.append(body)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        async for event in self._replies(body):
            if event["meta_info"]["finish_reason"] is not None:
                return JSONResponse(event)
        raise AssertionError("an engine's stream ended without a completion")

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        try:
            async for event in self._replies(body):
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
        except EngineError as error:
            yield b"data: " + json.dumps({"error": {"message": str(error)}}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _replies(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Cumulative answers; the last has a finish reason.

        Our engines end all requests with what they have, or none; so an abort of one cuts all, and the others go on.
        """
        rid, sampling = body.get("rid") or uuid.uuid4().hex, _sampling(body)
        said = Completion([], [], [], "aborted", None, [] if sampling.top_logprobs else None)
        self._running.add(rid)
        try:
            while said.finish_reason == "aborted" and rid not in self._aborted:
                rest = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(said.token_ids))
                streamed = list(said.token_ids)
                stream = self._engine.stream([*body["input_ids"], *said.token_ids], rest)
                async with aclosing(stream) as chunks:  # type: ignore[type-var]  # every engine's stream is a generator
                    async for chunk in chunks:
                        streamed += chunk.token_ids
                        if chunk.completion is None:
                            yield self._reply(rid, streamed, None)
                        else:
                            said = _joined(said, chunk.completion)
            yield self._finished(rid, body, said)
        finally:
            self._running.discard(rid)
            self._aborted.discard(rid)

    def _reply(self, rid: str, said: list[int], finish: dict[str, Any] | None, **meta: Any) -> dict[str, Any]:
        described = {"id": rid, "finish_reason": finish, "weight_version": self._weight_version, **meta}
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
        marked = self._running if body.get("abort_all") else self._running & {body["rid"]}
        if marked:
            self._aborted |= marked
            await self._engine.pause("abort")
            if not self._paused:
                await self._engine.resume()
        return Response(status_code=200)

    async def _pause(self, request: Request) -> dict[str, str]:
        mode = (await request.json()).get("mode", "abort")
        if mode == "abort":
            self._aborted |= self._running
        self._paused = True
        await self._engine.pause("abort" if mode == "abort" else "keep")
        return {"status": "ok", "message": "Generation paused successfully."}

    async def _continue(self) -> dict[str, str]:
        self._paused = False
        await self._engine.resume()
        return {"status": "ok", "message": "Generation continued successfully."}

    async def _update_from_disk(self, request: Request) -> Response:
        body = await request.json()
        version = body.get("weight_version") or "default"
        try:
            await self._engine.update_weights(int(version) if version.isdecimal() else 0, Path(body["model_path"]))
        except EngineError as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        self._weight_version = version
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def _update_from_tensor(self) -> Response:
        message = "handles of CUDA memory need a GPU: this is sparring's stand-in for SGLang"
        return JSONResponse({"success": False, "message": message}, status_code=400)

    async def _refuse(self, _request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)


def _joined(said: Completion, more: Completion) -> Completion:
    tops = None if said.top_logprobs is None else said.top_logprobs + (more.top_logprobs or [])
    return replace(
        more,
        token_ids=said.token_ids + more.token_ids,
        logprobs=said.logprobs + more.logprobs,
        policy_versions=said.policy_versions + more.policy_versions,
        top_logprobs=tops,
    )


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


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


async def _main(arguments: list[str]) -> None:
    from sparring.backend.engines.torch_engine import TorchEngine

    parser = argparse.ArgumentParser(description="Speak SGLang's endpoints on the embedded engine.")
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    options, _others = parser.parse_known_args(arguments)
    engine = TorchEngine(
        options.model_path, slots=options.max_running_requests, max_length=options.context_length, dtype=options.dtype
    )
    async with FakeSGLang(engine, options.model_path).serve(options.host, options.port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_main(sys.argv[1:]))
