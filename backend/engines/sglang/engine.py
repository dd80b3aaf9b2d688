"""The engine contract over one SGLang server, its own child or one that runs elsewhere."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sparring.backend.engines.base import (
    Chunk,
    Completion,
    Engine,
    EngineHealth,
    PauseMode,
    SamplingParams,
    WeightSource,
)
from sparring.backend.engines.sglang.protocol import (
    Reply,
    ServerInfo,
    check_sampling,
    generate_body,
    parse_reply,
    parse_server_info,
)
from sparring.backend.engines.sglang.server import SGLangServer
from sparring.backend.engines.sglang.transport import Transport
from sparring.backend.engines.sglang.weights import StagedWeights, WeightLayout, load_staged, stage
from sparring.errors import EngineError

__all__ = ["SGLangEngine"]

_CONTROL_S = 30.0  # pause and resume take milliseconds
_UPDATE_S = 300.0  # from disk, a large model takes minutes
_HEALTH_S = 4.5  # an idle server answers at once; the front end of a busy one may take seconds
_STAGED: WeightSource = []  # what `stage_weights` gives to `update_weights`
_PROBE_S = 60.0
_T = TypeVar("_T")


@dataclass(eq=False)
class _Request:
    """One leg of a generation, as the server sees it. A pause may end it; the next leg goes on from what it said."""

    rid: str
    token_ids: list[int]
    sampling: SamplingParams
    room: int
    version: int
    ended_by_us: bool = False


class SGLangEngine(Engine):
    """Samples from an SGLang server.

    Every token carries the version of the weights that sampled it. A server that `SGLangServer` started says so itself
    (see `launcher`), and its requests live through an update in place. A plain server does not; there a pause ends our
    requests, which go on after it as new requests whose prompt is what was said: exact too, at the price of reading
    the prompt again.

    `version` is ours; the prefix cache is salted with it and with this engine, so that no request reads the keys of
    other weights: those of another version, or those that an earlier run on the same server called by the same number.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        server: SGLangServer | None = None,
        url: str | None = None,
        max_length: int,
        request_timeout_s: float = 600.0,
        live: bool = True,
    ) -> None:
        """
        Args:
            model_path: the model that the server must hold; its tensors' names and shapes check every update.
            server: a server to start and stop with this engine.
            url: else the address of one that runs.
            max_length: context length in tokens, prompt and completion together.
            request_timeout_s: a request that is silent for so long has failed.
            live: `stream` gives tokens as they come. Else it asks for whole answers, as `generate` does: an event a
                token, for hundreds of requests, is more than the server's front end can send (see docs/gpu.md).

        Raises:
            ValueError: both or neither of `server` and `url`.
        """
        if (server is None) == (url is None):
            raise ValueError("give SGLangEngine either a server to start or the url of one that runs")
        self._layout = WeightLayout.of_model(model_path)
        self._server, self._max_length, self._timeout_s = server, max_length, request_timeout_s
        self._live = live
        self._salt = uuid.uuid4().hex[:8]
        self._transport = Transport(url or "")
        self._info: ServerInfo | None = None
        self._reports_versions = False
        self._failure: str | None = None
        self._running: set[_Request] = set()
        self._waiting = 0
        self._paused = False
        self._paused_at = 0.0
        self._aborts = 0
        self._changed = asyncio.Event()
        self._aborting: set[asyncio.Task[None]] = set()
        self._staged: StagedWeights | None = None
        self.last_pause_s = 0.0
        self.version = 0

    @property
    def url(self) -> str:
        return self._transport.url

    async def start(self) -> None:
        if self._server is not None:
            self._transport = Transport(await self._server.start())
        try:
            self._info = await self._identify()
            self.version = self._info.weight_version
            await self._control("/continue_generation", {})  # a client that died may have left it paused
            async with asyncio.timeout(_PROBE_S):
                probe = await self.generate([0], SamplingParams(max_new_tokens=1, temperature=0.0))
        except TimeoutError as error:
            await self.stop()
            raise EngineError(f"the server at {self.url} gave no token in {_PROBE_S:g} s; is it hung?") from error
        except BaseException:
            await self.stop()
            raise
        if not probe.token_ids:
            await self.stop()
            raise EngineError(f"the SGLang server at {self.url} sampled nothing when asked for one token")

    async def stop(self) -> None:
        self._failure = self._failure or "the SGLang engine was stopped"
        self._wake()
        for task in tuple(self._aborting):
            task.cancel()
        if self._server is not None:
            await self._server.stop()
        await self._transport.close()
        self._staged = None

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        # One answer instead of a stream: at hundreds of requests the server's event stream would be what binds.
        async with aclosing(self._legs(token_ids, sampling, stream=False)) as replies:
            async for reply in replies:
                if reply.finish_reason is not None:
                    return _completion(reply)
        raise AssertionError("a request ended without its end")

    async def stream(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        # A task reads the server's events, so that a pause that ends the request does not wait for our caller to read.
        replies: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        reading = asyncio.create_task(self._read_into(replies, token_ids, sampling))
        said = 0
        try:
            while True:
                reply = await replies.get()
                if isinstance(reply, Exception):
                    raise reply
                if len(reply.token_ids) > said:
                    yield Chunk(reply.token_ids[said:])
                    said = len(reply.token_ids)
                if reply.finish_reason is not None:
                    yield Chunk([], _completion(reply))
                    return
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._check()
        self._paused, self._paused_at = True, time.perf_counter()
        if mode == "abort":
            self._aborts += 1
            self._wake()
        if mode == "abort" or not self._reports_versions:
            await self._end_running()
        await self._control("/pause_generation", {"mode": "in_place"})

    async def stage_weights(self, version: int, source: WeightSource) -> WeightSource:
        self._staged = await stage(version, source, self._layout, self._staged)
        return _STAGED

    async def update_weights(self, version: int, source: WeightSource) -> None:
        self._check()
        if source is not _STAGED:
            await self.stage_weights(version, source)
        if self._staged is None or self._staged.version != version or self._staged.loaded:
            raise EngineError(f"weights {version} were not staged: call stage_weights with them first")
        await self._died_or(load_staged(self._transport, self._staged, deadline_s=_UPDATE_S))
        self.version = version

    async def resume(self) -> None:
        self._check()
        await self._control("/continue_generation", {})
        self._paused = False
        self._wake()
        self.last_pause_s = time.perf_counter() - self._paused_at

    async def publish(self, version: int, source: WeightSource) -> float:
        """Stage, pause, load and resume; returns the seconds for which decoding stood still."""
        staged = await self.stage_weights(version, source)
        await self.pause("keep")
        try:
            await self.update_weights(version, staged)
        finally:
            await self.resume()
        return self.last_pause_s

    async def health(self) -> EngineHealth:
        self._check()
        model = await self._died_or(self._transport.get("/model_info", deadline_s=_HEALTH_S))
        held = str(model.get("weight_version"))
        strange = held.isdecimal() and int(held) != self.version and not self._paused
        detail = f"the server holds weights {held}, not {self.version}: who else updates it?" if strange else ""
        running = 0 if self._paused else len(self._running)
        waiting = self._waiting + (len(self._running) if self._paused else 0)
        return EngineHealth(not strange, self.version, running, waiting, detail)

    async def release_memory(self) -> None:
        """Give the server's GPU memory to the trainer; needs `--enable-memory-saver`, and no requests in flight."""
        await self._control("/release_memory_occupation", {}, deadline_s=_UPDATE_S)

    async def resume_memory(self) -> None:
        """Take it back; weights and cache are empty until the next `update_weights`."""
        await self._control("/resume_memory_occupation", {}, deadline_s=_UPDATE_S)

    async def _read_into(
        self, replies: asyncio.Queue[Reply | Exception], token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        try:
            async with aclosing(self._legs(token_ids, sampling, stream=self._live)) as legs:
                async for reply in legs:
                    replies.put_nowait(reply)
        except Exception as error:  # raised where the caller reads
            replies.put_nowait(error)

    async def _legs(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, stream: bool
    ) -> AsyncGenerator[Reply, None]:
        """Cumulative replies of one generation, the last with a finish reason, across the pauses that cut it."""
        self._check()
        assert self._info is not None
        check_sampling(sampling, self._info)
        room = min(sampling.max_new_tokens, self._max_length - len(token_ids))
        if room < 1:
            raise EngineError(
                f"a prompt of {len(token_ids)} tokens leaves no room in a context of {self._max_length}: "
                "shorten the episode, or raise model.max_length"
            )
        said, aborts = Reply(versions=[]), self._aborts
        while len(said.token_ids) < room:
            await self._wait_open(aborts)
            if self._aborts > aborts:
                yield replace(said, finish_reason="aborted")
                return
            request = _Request(
                uuid.uuid4().hex, [*token_ids, *said.token_ids], sampling, room - len(said.token_ids), self.version
            )
            latest = said
            self._running.add(request)
            try:
                async for leg in self._ask(request, stream=stream):
                    latest = _joined(said, leg, request)
                    if leg.finish_reason != "aborted":
                        yield latest
            except BaseException:
                self._abort_soon(request)
                raise
            finally:
                self._running.discard(request)
                self._wake()
            if latest.finish_reason != "aborted":
                return
            if not request.ended_by_us:
                raise EngineError(f"the SGLang server at {self.url} aborted a request; nobody here asked for it")
            said = replace(latest, finish_reason=None)
        yield replace(said, finish_reason="length")

    async def _ask(self, request: _Request, *, stream: bool) -> AsyncGenerator[Reply, None]:
        """The cumulative replies of one leg."""
        salt = f"{self._salt}.v{request.version}"
        body = generate_body(
            request.rid, request.token_ids, request.sampling, room=request.room, cache_salt=salt, stream=stream
        )
        if not stream:
            data = await self._died_or(self._transport.post("/generate", body, deadline_s=self._timeout_s))
            reply = parse_reply(data or {}, request.sampling)
            self._reports_versions = self._reports_versions or reply.versions is not None
            yield reply
            return
        async with aclosing(self._transport.stream("/generate", body, deadline_s=self._timeout_s)) as events:
            try:
                async for data in events:
                    yield parse_reply(data, request.sampling)
            except EngineError as error:
                raise await self._explained(error) from error

    async def _wait_open(self, aborts: int) -> None:
        """Wait while paused, unless a later pause aborts what waits."""
        self._waiting += 1
        try:
            while self._paused and self._aborts == aborts and self._failure is None:
                await self._changed.wait()
        finally:
            self._waiting -= 1
        self._check()

    async def _end_running(self) -> None:
        """End our requests on the server and wait until each has its answer; the gate is shut, so none is added."""
        deadline = time.monotonic() + _CONTROL_S
        while self._running:
            if time.monotonic() > deadline:
                raise EngineError(f"the SGLang server at {self.url} did not abort its requests in {_CONTROL_S:g} s")
            for request in self._running:
                request.ended_by_us = True
            await asyncio.gather(*(self._abort(request.rid) for request in self._running))
            # A request that was still on its way when we aborted it is aborted again.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._none_running(), 0.5)

    async def _none_running(self) -> None:
        while self._running:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _abort(self, rid: str) -> None:
        with suppress(EngineError):  # a server that is gone has aborted everything
            await self._transport.post("/abort_request", {"rid": rid}, deadline_s=_CONTROL_S)

    def _abort_soon(self, request: _Request) -> None:
        """Tell the server that nobody waits for this request any more, without keeping a cancelled caller waiting."""
        if self._failure is None:
            task = asyncio.get_running_loop().create_task(self._abort(request.rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _control(self, path: str, body: dict[str, Any], *, deadline_s: float = _CONTROL_S) -> None:
        self._check()
        await self._died_or(self._transport.post(path, body, deadline_s=deadline_s))

    async def _identify(self) -> ServerInfo:
        model = await self._died_or(self._transport.get("/model_info", deadline_s=_CONTROL_S))
        server = await self._died_or(self._transport.get("/server_info", deadline_s=_CONTROL_S))
        info = parse_server_info(server or {}, model or {}, self.url)
        if info.architectures and self._layout.architecture not in info.architectures:
            raise EngineError(
                f"the SGLang server at {self.url} holds {info.architectures[0]} ({info.model_path}), but the model of "
                f"this run is {self._layout.architecture}: start the server with the same model"
            )
        return info

    async def _died_or(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except EngineError as error:
            raise await self._explained(error) from error

    async def _explained(self, error: EngineError) -> EngineError:
        """The same error, and how the server's own process died, where it did."""
        last_words = await self._server.last_words() if self._server is not None and self._failure is None else None
        return EngineError(f"{error}\n{last_words}") if last_words else error

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._info is None:
            raise EngineError("the engine was not started: await start() first")


def _joined(said: Reply, leg: Reply, request: _Request) -> Reply:
    """What was said before and what this leg says. A server that names no versions held one version all through it."""
    assert said.versions is not None
    versions = leg.versions if leg.versions is not None else [request.version] * len(leg.token_ids)
    tops = (said.top_logprobs or []) + (leg.top_logprobs or []) if request.sampling.top_logprobs else None
    return Reply(
        token_ids=said.token_ids + leg.token_ids,
        logprobs=said.logprobs + leg.logprobs,
        versions=said.versions + versions,
        finish_reason=leg.finish_reason,
        stop_string=leg.stop_string,
        top_logprobs=tops,
    )


def _completion(reply: Reply) -> Completion:
    assert reply.finish_reason is not None
    assert reply.versions is not None
    return Completion(
        token_ids=reply.token_ids,
        logprobs=reply.logprobs,
        policy_versions=reply.versions,
        finish_reason=reply.finish_reason,
        stop_string=reply.stop_string,
        top_logprobs=reply.top_logprobs,
    )
