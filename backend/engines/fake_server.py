"""What the shipped servers have in common, which speak another server's endpoints on an engine of ours."""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from sparring.backend.engines.base import Completion, Engine, PauseMode, SamplingParams
from sparring.backend.listen import listen
from sparring.errors import EngineError

__all__ = ["FakeServer", "joined", "run_as_program"]

_KEEPALIVE_S = 5  # SGLang's and vLLM's own

Endpoint = Callable[..., Awaitable[Any]]


class FakeServer:
    """An HTTP face over `engine`, which is started and stopped with it.

    Attributes:
        bodies: every request for tokens, in order, for tests that ask what was sent.
    """

    def __init__(self, engine: Engine, model_path: Path, title: str) -> None:
        self._engine, self._model_path = engine, model_path
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._paused = False
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI(title=title)
        self.app.add_exception_handler(EngineError, self._refuse)

    def _route(self, endpoints: Iterable[tuple[str, str, Endpoint]]) -> None:
        for method, path, endpoint in endpoints:
            self.app.add_api_route(path, endpoint, methods=[method], response_model=None)

    @asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen, start the engine, and give the URL.

        Raises:
            ConfigError: as `listen`; the engine has not started.
        """
        listener = listen(host, port)
        bound = listener.getsockname()[1]
        config = uvicorn.Config(self.app, log_level="warning", timeout_keep_alive=_KEEPALIVE_S, lifespan="off")
        server = uvicorn.Server(config)
        try:
            await self._engine.start()
        except BaseException:
            listener.close()
            raise
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            while not server.started:
                if serving.done():
                    serving.result()
                await asyncio.sleep(0.005)
            yield f"http://{host}:{bound}"
        finally:
            server.should_exit = server.force_exit = True
            await serving
            await self._engine.stop()

    async def _health(self) -> Response:
        return Response(status_code=200)

    async def _refuse(self, _request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)

    @contextmanager
    def _request(self, rid: str) -> Iterator[None]:
        """While this lasts, `_end` can end what is said under this name."""
        self._running.add(rid)
        try:
            yield
        finally:
            self._running.discard(rid)
            self._aborted.discard(rid)

    async def _say(
        self, rid: str, prompt: Sequence[int], sampling: SamplingParams
    ) -> AsyncIterator[list[int] | Completion]:
        """All tokens so far, again and again, and then the completion.

        Our engines end all requests with what they have, or none; so an abort of one cuts all, and the others go on.
        """
        said = Completion([], [], [], "aborted", None, [] if sampling.top_logprobs else None)
        while said.finish_reason == "aborted" and rid not in self._aborted:
            rest = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(said.token_ids))
            streamed = list(said.token_ids)
            stream = self._engine.stream([*prompt, *said.token_ids], rest)
            async with aclosing(stream) as chunks:  # type: ignore[type-var]  # every engine's stream is a generator
                async for chunk in chunks:
                    streamed += chunk.token_ids
                    if chunk.completion is None:
                        yield list(streamed)
                    else:
                        said = joined(said, chunk.completion)
        yield said

    async def _whole(self, rid: str, prompt: Sequence[int], sampling: SamplingParams) -> Completion:
        async for said in self._say(rid, prompt, sampling):
            if isinstance(said, Completion):
                return said
        raise AssertionError("an engine's stream ended without a completion")

    async def _end(self, rids: Iterable[str]) -> None:
        """End those of our requests with what they have."""
        marked = self._running & set(rids)
        if marked:
            self._aborted |= marked
            await self._engine.pause("abort")
            if not self._paused:
                await self._engine.resume()

    async def _stop_decoding(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._aborted |= self._running
        self._paused = True
        await self._engine.pause(mode)

    async def _go_on(self) -> None:
        self._paused = False
        await self._engine.resume()


def run_as_program(make: Callable[[Engine, Path], FakeServer], parser: argparse.ArgumentParser) -> None:
    """Serve the embedded engine until the standard input closes, as a child of a `ServerProcess` does.

    Args:
        parser: of the arguments that become `model`, `slots` and `max_length`; all that it does not know is ignored.
    """
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", default="bfloat16")
    options, _others = parser.parse_known_args()

    async def serve() -> None:
        from sparring.backend.engines.torch_engine import TorchEngine

        engine = TorchEngine(options.model, slots=options.slots, max_length=options.max_length, dtype=options.dtype)
        async with make(engine, options.model).serve(options.host, options.port):
            await asyncio.Event().wait()

    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(serve())


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def joined(said: Completion, more: Completion) -> Completion:
    tops = None if said.top_logprobs is None else said.top_logprobs + (more.top_logprobs or [])
    return replace(
        more,
        token_ids=said.token_ids + more.token_ids,
        logprobs=said.logprobs + more.logprobs,
        policy_versions=said.policy_versions + more.policy_versions,
        top_logprobs=tops,
    )
