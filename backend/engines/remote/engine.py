"""The engine contract over one server, its own child or one that runs elsewhere, whatever it speaks."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sparring.backend.engines.base import (
    Chunk,
    Completion,
    Engine,
    EngineHealth,
    PauseMode,
    SamplingParams,
    WeightSource,
)
from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.process import ServerProcess
from sparring.backend.engines.remote.reply import Leg, Reply, completion, joined, refusal
from sparring.backend.engines.remote.transport import Transport
from sparring.errors import EngineError

__all__ = ["Call", "RemoteEngine"]

Call = tuple[str, dict[str, Any]]  # a path, and the body that is posted to it

_CONTROL_S = 30.0  # pause and resume take milliseconds
_UPDATE_S = 300.0  # from disk, a large model takes minutes
_STAGED: WeightSource = []  # what `stage_weights` gives to `update_weights`
_PROBE_S = 60.0
_T = TypeVar("_T")


class RemoteEngine(Engine):
    """Samples from a server.

    Every token carries the version of the weights that sampled it. Where the server says so itself, requests live
    through an update in place. Where it does not, a pause ends our requests, which go on after it as new requests whose
    prompt is what was said: exact too, at the price of reading the prompt again.

    `version` is ours; the prefix cache is salted with it and with this engine, so that no request reads the keys of
    other weights: those of another version, or those that an earlier run on the same server called by the same number.
    """

    kind: ClassVar[str]  # the server's name, for messages

    def __init__(
        self,
        model_path: Path,
        *,
        server: ServerProcess[Any] | None = None,
        url: str | None = None,
        key: str | None = None,
        max_length: int,
        request_timeout_s: float = 600.0,
        live: bool = True,
    ) -> None:
        """
        Args:
            model_path: the model that the server must hold; its tensors' names and shapes check every update.
            server: a server to start and stop with this engine.
            url: else the address of one that runs.
            key: the API key of the server at `url`, if it has one.
            max_length: context length in tokens, prompt and completion together.
            request_timeout_s: a request that is silent for so long has failed.
            live: `stream` gives tokens as they come. Else it asks for whole answers, as `generate` does: an event a
                token, for hundreds of requests, is more than a server's front end can send (see docs/gpu.md).

        Raises:
            ValueError: both or neither of `server` and `url`.
        """
        if (server is None) == (url is None):
            raise ValueError(f"give {type(self).__name__} either a server to start or the url of one that runs")
        self._layout = WeightLayout.of_model(model_path)
        self._server, self._max_length, self._timeout_s = server, max_length, request_timeout_s
        self._live = live
        self._salt = uuid.uuid4().hex[:8]
        self._transport = Transport(url or "", key=key)
        self._reports_versions = False
        self._failure: str | None = "the engine was not started: await start() first"
        self._last_words: str | None = None
        self._running: set[Leg] = set()
        self._waiting = 0
        self._paused = False
        self._paused_at = 0.0
        self._aborts = 0
        self._changed = asyncio.Event()
        self._aborting: set[asyncio.Task[None]] = set()
        self._staged: Any = None
        self._updated = False
        self.last_pause_s = 0.0
        self.version = 0

    @property
    def url(self) -> str:
        return self._transport.url

    @abstractmethod
    async def _identify(self) -> int:
        """Make sure that a server of this kind with our model answers; returns the version of its weights.

        Raises:
            EngineError: it is something else, or holds another model.
        """

    @abstractmethod
    async def _held(self) -> str:
        """What the server calls the weights that it holds now."""

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse what this server would quietly not do; most do all of it."""

    @abstractmethod
    def _ask(self, leg: Leg, *, stream: bool) -> Call: ...

    @abstractmethod
    def _parse(self, data: Any, leg: Leg, before: Reply) -> Reply:
        """The cumulative reply, of a whole answer or of one event of a stream that said `before` so far."""

    @abstractmethod
    def _abort(self, rid: str) -> Call: ...

    @abstractmethod
    def _pause(self) -> Call:
        """Stop decoding between two tokens, requests kept."""

    @abstractmethod
    def _resume(self) -> Call: ...

    @abstractmethod
    async def _stage(self, version: int, source: WeightSource) -> Any:
        """Weights checked and brought to where the server can read them; has a `version`, and `loaded` once it did."""

    @abstractmethod
    async def _load(self, staged: Any, *, deadline_s: float) -> None: ...

    async def start(self) -> None:
        if self._server is not None:
            self._transport = Transport(await self._server.start(), key=self._server.key)
        self._failure = self._last_words = None
        try:
            self.version = await self._identify()
            await self._control(*self._resume())  # a client that died may have left it paused
            async with asyncio.timeout(_PROBE_S):
                await self._probe()
        except TimeoutError as error:
            await self.stop()
            raise EngineError(f"the server at {self.url} gave no token in {_PROBE_S:g} s; is it hung?") from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        self._failure = f"the {self.kind} engine was stopped"
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
                    return completion(reply)
        raise AssertionError("a request ended without its end")

    async def stream(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        if not self._live:
            said = await self.generate(token_ids, sampling, session_id=session_id)
            yield Chunk(said.token_ids)
            yield Chunk([], said)
            return
        # A task reads the server's events, so that a pause that ends the request does not wait for our caller to read.
        replies: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        reading = asyncio.create_task(self._read_into(replies, token_ids, sampling))
        shown = 0
        try:
            while True:
                reply = await replies.get()
                if isinstance(reply, Exception):
                    raise reply
                if len(reply.token_ids) > shown:
                    yield Chunk(reply.token_ids[shown:])
                    shown = len(reply.token_ids)
                if reply.finish_reason is not None:
                    yield Chunk([], completion(reply))
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
        await self._control(*self._pause())

    async def stage_weights(self, version: int, source: WeightSource) -> WeightSource:
        self._staged = await self._stage(version, source)
        return _STAGED

    async def update_weights(self, version: int, source: WeightSource) -> None:
        self._check()
        if source is not _STAGED:
            await self.stage_weights(version, source)
        if self._staged is None or self._staged.version != version or self._staged.loaded:
            raise EngineError(f"weights {version} were not staged: call stage_weights with them first")
        await self._died_or(self._load(self._staged, deadline_s=_UPDATE_S))
        self.version, self._updated = version, True

    async def resume(self) -> None:
        self._check()
        await self._control(*self._resume())
        self._paused = False
        self._wake()
        self.last_pause_s = time.perf_counter() - self._paused_at

    async def publish(self, version: int, source: WeightSource) -> float:
        """Stage, pause, load, resume and verify; returns the seconds for which decoding stood still."""
        staged = await self.stage_weights(version, source)
        await self.pause("keep")
        try:
            await self.update_weights(version, staged)
        except BaseException:
            with suppress(EngineError):  # what came first is what is wrong
                await self.resume()
            raise
        await self.resume()
        await self.verify_weights()
        return self.last_pause_s

    async def health(self) -> EngineHealth:
        self._check()
        held = await self._died_or(self._held())
        # A server that was restarted calls its weights by no number of ours.
        strange = held != str(self.version) and (held.isdecimal() or self._updated) and not self._paused
        whence = "who else updates it?" if held.isdecimal() else "was it restarted?"
        detail = f"the server holds weights {held}, not {self.version}: {whence}" if strange else ""
        running = 0 if self._paused else len(self._running)
        waiting = self._waiting + (len(self._running) if self._paused else 0)
        return EngineHealth(not strange, self.version, running, waiting, detail)

    async def _probe(self) -> None:
        """Ask for one token: a server may be up and not able to sample."""
        probe = await self.generate([0], SamplingParams(max_new_tokens=1, temperature=0.0))
        if not probe.token_ids:
            raise EngineError(f"the {self.kind} server at {self.url} sampled nothing when asked for one token")

    async def _read_into(
        self, replies: asyncio.Queue[Reply | Exception], token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        try:
            async with aclosing(self._legs(token_ids, sampling, stream=True)) as legs:
                async for reply in legs:
                    replies.put_nowait(reply)
        except Exception as error:  # raised where the caller reads
            replies.put_nowait(error)

    async def _legs(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, stream: bool
    ) -> AsyncGenerator[Reply, None]:
        """Cumulative replies of one generation, the last with a finish reason, across the pauses that cut it."""
        self._check()
        self._check_sampling(sampling)
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
            leg = Leg(
                rid=uuid.uuid4().hex,
                token_ids=[*token_ids, *said.token_ids],
                sampling=sampling,
                room=room - len(said.token_ids),
                version=self.version,
                cache_salt=f"{self._salt}.v{self.version}",
            )
            latest = said
            self._running.add(leg)
            try:
                async for reply in self._replies(leg, stream=stream):
                    latest = joined(said, reply, leg)
                    if reply.finish_reason != "aborted":
                        yield latest
            except BaseException:
                self._abort_soon(leg)
                raise
            finally:
                self._running.discard(leg)
                self._wake()
            if latest.finish_reason != "aborted":
                return
            if not leg.ended_by_us:
                raise EngineError(f"the {self.kind} server at {self.url} aborted a request; nobody here asked for it")
            said = replace(latest, finish_reason=None)
        yield replace(said, finish_reason="length")

    async def _replies(self, leg: Leg, *, stream: bool) -> AsyncGenerator[Reply, None]:
        """The cumulative replies of one leg."""
        path, body = self._ask(leg, stream=stream)
        reply = Reply()
        if not stream:
            said = self._transport.post(path, body, deadline_s=self._timeout_s, repeatable=True)
            data = await self._died_or(said)
            reply = self._parse(data if isinstance(data, dict) else {}, leg, reply)
            self._reports_versions = self._reports_versions or reply.versions is not None
            yield reply
            return
        async with aclosing(self._transport.stream(path, body, deadline_s=self._timeout_s)) as events:
            try:
                async for data in events:
                    reply = self._parse(data, leg, reply)
                    yield reply
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
                raise EngineError(
                    f"the {self.kind} server at {self.url} did not abort its requests in {_CONTROL_S:g} s"
                )
            for leg in self._running:
                leg.ended_by_us = True
            await asyncio.gather(*(self._abort_now(leg.rid) for leg in self._running))
            # A request that was still on its way when we aborted it is aborted again.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._none_running(), 0.5)

    async def _none_running(self) -> None:
        while self._running:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _abort_now(self, rid: str) -> None:
        path, body = self._abort(rid)
        with suppress(EngineError):  # a server that is gone has aborted everything
            await self._transport.post(path, body, deadline_s=_CONTROL_S, repeatable=True)

    def _abort_soon(self, leg: Leg) -> None:
        """Tell the server that nobody waits for this request any more, without keeping a cancelled caller waiting."""
        if self._failure is None:
            task = asyncio.get_running_loop().create_task(self._abort_now(leg.rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _control(self, path: str, body: dict[str, Any], *, deadline_s: float = _CONTROL_S) -> None:
        self._check()
        answer = await self._died_or(self._transport.post(path, body, deadline_s=deadline_s))
        reason = refusal(answer)
        if reason is not None:
            raise EngineError(f"the {self.kind} server at {self.url} refused {path}: {reason}")

    async def _died_or(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except EngineError as error:
            raise await self._explained(error) from error

    async def _explained(self, error: EngineError) -> EngineError:
        """The same error, and how our own server died, where it did: what waits at the gate then fails of that too."""
        if self._server is not None and self._failure is None:
            last_words = await self._server.last_words()
            if last_words is not None and self._failure is None:
                self._failure = self._last_words = last_words
                self._wake()
        return EngineError(f"{error}\n{self._last_words}") if self._last_words is not None else error

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
