"""One episode, as an agent and the recorder see it: requests in, messages out, every sampled token kept."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparring.backend.deadlines import end_now
from sparring.backend.engines.base import Chunk, Completion, SamplingParams
from sparring.backend.gateway.budget import Budget
from sparring.backend.gateway.canonical import root_key
from sparring.backend.gateway.chat_format import ChatFormat
from sparring.backend.gateway.continuation import uninterrupted
from sparring.backend.gateway.export import concat
from sparring.backend.gateway.formats import Parsed
from sparring.backend.gateway.formats.think import split_reasoning
from sparring.backend.gateway.record import SessionRecord
from sparring.backend.gateway.request import ChatRequest, RecordedReply, TextDelta, honoured
from sparring.backend.gateway.served import POLICY, ServedModel
from sparring.backend.gateway.speech import Speech
from sparring.backend.gateway.tree import ConversationTree, TurnNode
from sparring.errors import EngineError, GatewayError
from sparring.types import ChatClient, ChatReply, Message, StopReason, ToolCall, Usage

if TYPE_CHECKING:
    from sparring.backend.gateway.recorder import Recorder

__all__ = ["Session"]

_ATTEMPTS = 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Prepared:
    """A request and where it stands in the session's tree."""

    model: ServedModel
    request: ChatRequest
    root_key: bytes
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
        models: Mapping[str, ServedModel],
        evaluation: SamplingParams | None,
        budget: Budget,
        deadline: float | None,
    ) -> None:
        self._recorder, self.session_id, self._api_key = recorder, session_id, api_key
        self._totals = recorder.totals
        self._models, self._evaluation, self._budget, self._deadline = models, evaluation, budget, deadline
        self._tree = ConversationTree()
        self._normalised: Counter[str] = Counter()
        self._rewards: dict[str, float] = {}
        self._usage = Usage()
        self._begun = 0
        self._named = 0
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
        """As `reply`, in the words of `ChatClient`."""
        return await self.reply(
            ChatRequest(tuple(messages), tuple(tools), agent_id=agent_id, max_new_tokens=max_new_tokens)
        )

    async def reply(self, request: ChatRequest) -> RecordedReply:
        """Sample the next assistant message and record it.

        Raises:
            BudgetExhausted: the session's turn or token budget, or the model's context, ran out.
            GatewayError: the opening prompt does not fit the context, a setting cannot be honoured, the session has
                ended or its deadline passed.
            EngineError: the engine failed. What was recorded before stands.
        """
        async with aclosing(self._answers(request, live=False)) as parts:
            async for part in parts:
                if isinstance(part, RecordedReply):
                    return part
        raise EngineError(f"session {self.session_id}: a stream ended without its reply")

    def stream(self, request: ChatRequest) -> AsyncGenerator[TextDelta | RecordedReply, None]:
        """As `reply`, piece by piece: the deltas make up the content of the reply, which comes last.

        Leaving the generator aborts the request, and nothing is recorded.
        """
        return self._answers(request, live=True)

    async def _answers(self, request: ChatRequest, *, live: bool) -> AsyncGenerator[TextDelta | RecordedReply, None]:
        """As `stream`; where it is not `live`, the whole content is the one delta."""
        # A form that the client insists on is met by sampling again, which is sampling under the condition.
        model = self._model(request.policy_id)
        free = self._evaluation is not None or not model.trained
        attempts = _ATTEMPTS if free and request.constrained else 1
        live = live and attempts == 1
        for attempt in range(attempts):
            prepared = self._prepare(model, request, attempt)
            speech = Speech(model.chat, request.stop)
            async with aclosing(self._sample(prepared, live=live)) as chunks:
                async for chunk in chunks:
                    if live:
                        for delta in speech.hear(chunk.token_ids):
                            yield delta
                    if chunk.completion is None:
                        continue
                    message = self._message(model.chat, request, chunk.completion)
                    if attempts > 1 and not request.accepts(message):
                        break
                    reply = self._record(prepared, chunk.completion, message)
                    for delta in speech.rest(message):
                        yield delta
                    yield reply
                    return
        raise GatewayError(
            f"{attempts} answers in a row lack the form that the request insists on (tool_choice or response_format)",
            param="tool_choice" if request.json_schema is None else "response_format",
        )

    def new_interaction_id(self) -> str:
        """A name for a turn that is yet to be sampled."""
        self._named += 1
        return f"{self.session_id}-{self._named - 1}"

    def conversation(self, interaction_id: str) -> tuple[Message, ...]:
        """All messages up to and with the one that an earlier turn said.

        Raises:
            GatewayError: there is no such turn.
        """
        return tuple(message for turn in self._turn(interaction_id).path for message in turn.messages)

    def set_reward(self, reward: float, interaction_id: str | None = None) -> None:
        """Reward a turn, the latest one by default. A second reward replaces the first.

        Raises:
            GatewayError: no turn yet, or none of that id; a reward that is not finite.
        """
        self._check_open()
        if not math.isfinite(reward):
            raise GatewayError(f"a reward is a finite number, not {reward}", status=422, param="reward")
        if not self._tree.turns:
            raise GatewayError(f"session {self.session_id} has no interaction to reward yet", param="interaction_id")
        turn = self._tree.turns[-1] if interaction_id is None else self._turn(interaction_id)
        self._rewards[turn.interaction_id] = reward

    @property
    def said(self) -> tuple[Message, ...]:
        """Every message that was sampled, in the order of time, whichever conversation it stands in."""
        return tuple(turn.messages[-1] for turn in self._tree.turns)

    @property
    def exhausted(self) -> StopReason | None:
        """The budget that a request was refused for."""
        return self._budget.exhausted

    def chat_format(self, policy_id: str = POLICY) -> ChatFormat:
        return self._model(policy_id).chat

    def policy_for(self, name: str) -> str:
        """As `Recorder.policy_for`."""
        return self._recorder.policy_for(name)

    def _model(self, policy_id: str) -> ServedModel:
        if policy_id not in self._models:
            raise GatewayError(f"no model {policy_id!r}; there are {', '.join(self._models)}", param="model")
        model = self._models[policy_id]
        return replace(model, sampling=self._evaluation) if self._evaluation and model.trained else model

    def close(self) -> SessionRecord:
        """End the session: requests that still run fail, and what was recorded is handed out."""
        self.closed = True
        for wait in self._waits:
            end_now(wait)
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
            rewards=dict(self._rewards),
            exhausted=self._budget.exhausted,
            tree=self._tree,
        )

    @property
    def lineages(self) -> tuple[str, ...]:
        """The names under which the engine may have kept something of this session."""
        return tuple(self._lineages)

    def _prepare(self, model: ServedModel, request: ChatRequest, attempt: int) -> _Prepared:
        self._check_open()
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise GatewayError(f"max_tokens must be at least 1, not {request.max_new_tokens}", param="max_tokens")
        sampling, replaced = honoured(
            model.sampling, request, evaluation=self._evaluation is not None or not model.trained
        )
        if request.tools and not model.chat.takes_tools:
            raise GatewayError(
                "the model's chat template ignores tools: set model.tool_template to a shipped one, such as 'hermes'",
                param="tools",
            )
        messages, tools = self._tree.restored(request.messages), request.tools
        key = root_key(model.policy_id, tools if model.chat.renders_tools else ())
        match = self._tree.match(key, messages)
        parent, covered = match.parent, match.length
        prompt_ids: list[int] | None = None
        past_ids: list[int] = []
        if parent is not None:
            past_ids = parent.token_ids
            if model.chat.history == "template":
                prompt_ids = model.chat.encode_rendered(past_ids, messages, tools)
            else:
                history, new = messages[:covered], messages[covered:]
                prompt_ids = model.chat.encode_suffix(history, new, tools, ended=parent.ended)
        if prompt_ids is None:
            parent, covered, past_ids, prompt_ids = None, 0, [], model.chat.encode_prompt(messages, tools)
        context_ids = past_ids + prompt_ids
        room = model.max_length - len(context_ids)
        if room < 1:
            problem = f"a prompt of {len(context_ids)} tokens leaves no room in the context of {model.max_length}"
            if self._tree.turns:
                raise self._budget.refusal(StopReason.MAX_TOKENS, f"session {self.session_id}: {problem}")
            raise GatewayError(
                f"session {self.session_id}: {problem}: shorten the task's prompt, or raise model.max_length",
                param="messages",
            )
        for counter in (self._normalised, self._totals.normalised):
            counter.update(replaced if attempt == 0 else ())
        self._begun += 1
        return _Prepared(
            model=model,
            request=replace(request, messages=messages),
            root_key=key,
            parent=parent,
            covered=covered,
            prompt_ids=prompt_ids,
            context_ids=context_ids,
            lineage=self._lineage_for(parent),
            sampling=replace(
                sampling,
                max_new_tokens=min(sampling.max_new_tokens, room),
                stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *model.chat.end_ids))),
                seed=self._request_seed(sampling.seed),
            ),
        )

    async def _sample(self, prepared: _Prepared, *, live: bool) -> AsyncGenerator[Chunk, None]:
        """The chunks of an answer; where it is not `live`, the last one alone."""
        self._lineages[prepared.lineage] = True
        granted: int | None = None
        used: int | None = None
        try:
            sampling = prepared.sampling
            if prepared.model.trained:
                granted = await self._bounded(self._budget.take(sampling.max_new_tokens))
                sampling = replace(sampling, max_new_tokens=granted)
            engine = prepared.model.engine
            stream = uninterrupted(engine, prepared.context_ids, sampling, session_id=prepared.lineage)
            async with aclosing(stream):
                while (chunk := await self._bounded(anext(stream, None) if live else _last(stream))) is not None:
                    if chunk.completion is not None:
                        used = len(chunk.completion.token_ids)
                    yield chunk
        finally:
            self._lineages[prepared.lineage] = False
            if granted is not None:
                self._budget.settle(granted, used)

    def _message(self, chat: ChatFormat, request: ChatRequest, said: Completion) -> Message:
        """The assistant message in what was sampled, as the client gets it."""
        text = chat.said(said.token_ids)
        if said.stop_string in request.stop:
            text = text.partition(said.stop_string)[0]
        parsed = chat.parser.parse(text, request.tools)
        if parsed.calls and request.tool_choice == "none":
            parsed = Parsed(split_reasoning(text)[1], (), parsed.reasoning)
        calls = tuple(
            ToolCall(call.id or self._call_id(index), call.name, call.arguments)
            for index, call in enumerate(parsed.calls[:1] if request.one_call else parsed.calls)
        )
        content = parsed.content if parsed.content or not calls else None
        return Message("assistant", content=content, tool_calls=calls, reasoning=parsed.reasoning)

    def _record(self, prepared: _Prepared, said: Completion, message: Message) -> RecordedReply:
        chat = prepared.model.chat
        text = chat.decode(said.token_ids)
        finish_reason = "tool_calls" if message.tool_calls and said.finish_reason == "stop" else said.finish_reason
        turn = TurnNode(
            parent=prepared.parent,
            prompt_ids=prepared.prompt_ids,
            completion=said,
            messages=(*prepared.request.messages[prepared.covered :], message),
            interaction_id=prepared.request.interaction_id or self.new_interaction_id(),
            lineage=prepared.lineage,
            ended=bool(said.token_ids) and said.token_ids[-1] in chat.end_ids,
            finish_reason=finish_reason,
            agent_id=prepared.request.agent_id,
            policy_id=prepared.model.policy_id,
            trained=prepared.model.trained,
            temperature=prepared.sampling.temperature or 1.0,  # greedy log-probabilities are those of temperature 1
        )
        spellings = (message, Message("assistant", text))
        broken = self._tree.add(prepared.root_key, prepared.request.messages, turn, spellings)
        self._totals.breaks.update([broken] if broken else [])
        usage = Usage(len(prepared.context_ids), len(said.token_ids), 1)
        self._usage = _sum(self._usage, usage)
        self._totals.usage = _sum(self._totals.usage, usage)
        stop_string = said.stop_string if said.stop_string in prepared.request.stop else None
        return RecordedReply(
            message, text, finish_reason, usage, turn.interaction_id, turn.policy_id, said, stop_string
        )

    def _turn(self, interaction_id: str) -> TurnNode:
        for turn in reversed(self._tree.turns):
            if turn.interaction_id == interaction_id:
                return turn
        raise GatewayError(
            f"session {self.session_id} has no interaction {interaction_id!r}", param="interaction_id"
        )

    def _lineage_for(self, parent: TurnNode | None) -> str:
        if parent is not None and not parent.children and not self._lineages.get(parent.lineage):
            return parent.lineage
        return f"{self.session_id}/{len(self._lineages)}"

    def _request_seed(self, seed: int | None) -> int | None:
        """A seed of the request's own, drawn from the run's: the members of a group must not sample alike."""
        return None if seed is None else int.from_bytes(self._digest(f"seed {seed} {self._begun}")[:4], "big")

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


async def _last(stream: AsyncIterator[Chunk]) -> Chunk | None:
    last: Chunk | None = None
    async for chunk in stream:
        last = chunk
    return last


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        one.prompt_tokens + other.prompt_tokens,
        one.completion_tokens + other.completion_tokens,
        one.turns + other.turns,
    )
