"""One episode, as an agent and the recorder see it: requests in, messages out, every sampled token kept."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparring.backend.engines.base import Chunk, Completion, Engine, SamplingParams
from sparring.backend.gateway.budget import Budget
from sparring.backend.gateway.canonical import tools_key
from sparring.backend.gateway.chat_format import ChatFormat
from sparring.backend.gateway.export import concat
from sparring.backend.gateway.tree import ConversationTree, TurnNode
from sparring.errors import EngineError, GatewayError
from sparring.types import ChatClient, ChatReply, Message, StopReason, TokenSequence, ToolCall, Usage

if TYPE_CHECKING:
    from sparring.backend.gateway.recorder import Recorder

__all__ = ["Session", "SessionRecord"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class SessionRecord:
    """What a session leaves behind.

    Attributes:
        sequences: exactly as sampled, one for each leaf of the session's conversations.
        messages: the conversation of the latest turn, in OpenAI's format.
        breaks: why each sequence after the first had to start.
        normalised: client sampling settings that the run's replaced, by name.
        exhausted: the budget that a request was refused for, or None.
    """

    session_id: str
    sequences: tuple[TokenSequence, ...]
    usage: Usage
    messages: tuple[Mapping[str, Any], ...]
    breaks: Counter[str]
    normalised: Counter[str]
    exhausted: StopReason | None


@dataclass(frozen=True)
class _Request:
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    tools_key: bytes
    agent_id: str
    parent: TurnNode | None
    covered: int  # messages that the parent's context covers
    prompt_ids: list[int]  # behind the parent's context
    context_ids: list[int]  # all of it
    lineage: str
    sampling: SamplingParams


class Session(ChatClient):
    """A `ChatClient` whose turns are recorded, made by `Recorder.open_session`. Its requests may run at once."""

    def __init__(
        self,
        recorder: Recorder,
        session_id: str,
        api_key: str,
        *,
        engine: Engine,
        chat: ChatFormat,
        sampling: SamplingParams,
        max_length: int,
        budget: Budget,
        deadline: float | None,
    ) -> None:
        self._recorder, self.session_id, self._api_key = recorder, session_id, api_key
        self._engine, self._chat, self._sampling, self._max_length = engine, chat, sampling, max_length
        self._budget, self._deadline = budget, deadline
        self._tree = ConversationTree()
        self._normalised: Counter[str] = Counter()
        self._usage = Usage()
        self._begun = 0
        self._lineages: dict[str, bool] = {}  # every chain of turns, and whether a request is extending it
        self._waits: set[asyncio.Timeout] = set()
        self.closed = False

    @property
    def base_url(self) -> str | None:
        return self._recorder.base_url

    @property
    def api_key(self) -> str:
        return self._api_key

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        agent_id: str = "main",
        max_new_tokens: int | None = None,
    ) -> ChatReply:
        """Sample the next assistant message and record it.

        Raises:
            BudgetExhausted: the session's turn or token budget, or the model's context, ran out.
            GatewayError: the opening prompt does not fit the context, the session has ended or its deadline passed.
            EngineError: the engine failed. What was recorded before stands.
        """
        request = self._prepare(messages, tools, agent_id, max_new_tokens)
        async with aclosing(self._sample(request)) as chunks:
            async for chunk in chunks:
                if chunk.completion is not None:
                    return self._record(request, chunk.completion)
        raise EngineError(f"session {self.session_id}: the engine's stream ended without its completion")

    def close(self) -> SessionRecord:
        """End the session: requests that still run fail, and what was recorded is handed out."""
        self.closed = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
        return self.record()

    def record(self) -> SessionRecord:
        latest = self._tree.turns[-1].path if self._tree.turns else []
        return SessionRecord(
            session_id=self.session_id,
            sequences=concat(self._tree),
            usage=self._usage,
            messages=tuple(message.to_openai() for turn in latest for message in turn.messages),
            breaks=Counter(self._tree.breaks),
            normalised=Counter(self._normalised),
            exhausted=self._budget.exhausted,
        )

    @property
    def lineages(self) -> tuple[str, ...]:
        """The names under which the engine may have kept something of this session."""
        return tuple(self._lineages)

    def _prepare(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        agent_id: str,
        max_new_tokens: int | None,
    ) -> _Request:
        self._check_open()
        if max_new_tokens is not None and max_new_tokens < 1:
            raise GatewayError(f"max_tokens must be at least 1, not {max_new_tokens}", param="max_tokens")
        key = tools_key(tools if self._chat.renders_tools else ())
        match = self._tree.match(key, messages)
        parent, covered = match.parent, match.length
        prompt_ids: list[int] | None = None
        if parent is not None:
            history, new = messages[:covered], messages[covered:]
            prompt_ids = self._chat.encode_suffix(history, new, tools, ended=parent.ended)
        if prompt_ids is None:
            parent, covered, prompt_ids = None, 0, self._chat.encode_prompt(messages, tools)
        context_ids = parent.token_ids + prompt_ids if parent else prompt_ids
        room = self._max_length - len(context_ids)
        if room < 1:
            problem = f"a prompt of {len(context_ids)} tokens leaves no room in the context of {self._max_length}"
            if self._tree.turns:
                raise self._budget.refusal(StopReason.MAX_TOKENS, f"session {self.session_id}: {problem}")
            raise GatewayError(
                f"session {self.session_id}: {problem}: shorten the task's prompt, or raise model.max_length",
                param="messages",
            )
        wanted = self._sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        sampling = replace(
            self._sampling,
            max_new_tokens=min(wanted, self._sampling.max_new_tokens, room),
            stop_token_ids=tuple(dict.fromkeys((*self._sampling.stop_token_ids, *self._chat.end_ids))),
            seed=self._request_seed(),
        )
        return _Request(
            messages=tuple(messages),
            tools=tuple(tools),
            tools_key=key,
            agent_id=agent_id,
            parent=parent,
            covered=covered,
            prompt_ids=prompt_ids,
            context_ids=context_ids,
            lineage=self._lineage_for(parent),
            sampling=sampling,
        )

    async def _sample(self, request: _Request) -> AsyncGenerator[Chunk, None]:
        self._lineages[request.lineage] = True
        granted: int | None = None
        used: int | None = None
        try:
            granted = await self._bounded(self._budget.take(request.sampling.max_new_tokens))
            sampling = replace(request.sampling, max_new_tokens=granted)
            stream = self._engine.stream(request.context_ids, sampling, session_id=request.lineage)
            async with aclosing(stream):  # type: ignore[type-var]  # each is a generator
                while (chunk := await self._bounded(anext(stream, None))) is not None:
                    if chunk.completion is not None:
                        used = len(chunk.completion.token_ids)
                    yield chunk
        finally:
            self._lineages[request.lineage] = False
            if granted is not None:
                self._budget.settle(granted, used)

    def _record(self, request: _Request, said: Completion) -> ChatReply:
        parsed = self._chat.parse(said.token_ids, request.tools)
        text = self._chat.decode(said.token_ids)
        calls = tuple(
            ToolCall(call.id or self._call_id(index), call.name, call.arguments)
            for index, call in enumerate(parsed.calls)
        )
        message = Message(
            "assistant",
            content=parsed.content if parsed.content or not calls else None,
            tool_calls=calls,
            reasoning=parsed.reasoning,
        )
        finish_reason = "tool_calls" if calls and said.finish_reason == "stop" else said.finish_reason
        turn = TurnNode(
            parent=request.parent,
            prompt_ids=request.prompt_ids,
            completion=said,
            messages=(*request.messages[request.covered :], message),
            interaction_id=f"{self.session_id}-{len(self._tree.turns)}",
            lineage=request.lineage,
            ended=bool(said.token_ids) and said.token_ids[-1] in self._chat.end_ids,
            finish_reason=finish_reason,
            agent_id=request.agent_id,
            temperature=request.sampling.temperature or 1.0,  # greedy log-probabilities are those of temperature 1
        )
        self._tree.add(request.tools_key, request.messages, turn, spellings=(message, Message("assistant", text)))
        usage = Usage(len(request.context_ids), len(said.token_ids), 1)
        self._usage = Usage(
            self._usage.prompt_tokens + usage.prompt_tokens,
            self._usage.completion_tokens + usage.completion_tokens,
            self._usage.turns + 1,
        )
        return ChatReply(message, text, finish_reason, usage, turn.interaction_id)

    def _lineage_for(self, parent: TurnNode | None) -> str:
        if parent is not None and not parent.children and not self._lineages.get(parent.lineage):
            return parent.lineage
        return f"{self.session_id}/{len(self._lineages)}"

    def _request_seed(self) -> int | None:
        """A seed of the request's own, drawn from the run's: the members of a group must not sample alike."""
        self._begun += 1
        if self._sampling.seed is None:
            return None
        return int.from_bytes(self._digest(f"seed {self._sampling.seed} {self._begun}")[:4], "big")

    def _call_id(self, index: int) -> str:
        """Nine letters and digits, the one form that every template accepts (Mistral's insists), and repeatable."""
        return self._digest(f"call {len(self._tree.turns)} {index}").hex()[:9]

    def _digest(self, text: str) -> bytes:
        return hashlib.blake2b(f"{self.session_id} {text}".encode()).digest()

    def _check_open(self) -> None:
        if self.closed:
            raise GatewayError(f"session {self.session_id} has ended: it takes no more requests", status=410)
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            raise GatewayError(f"session {self.session_id}: its deadline has passed", status=410)

    async def _bounded(self, awaitable: Awaitable[_T]) -> _T:
        """Wait no longer than the session lasts."""
        self._check_open()
        try:
            async with asyncio.timeout_at(self._deadline) as wait:
                self._waits.add(wait)
                try:
                    return await awaitable
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            self._check_open()
            raise
