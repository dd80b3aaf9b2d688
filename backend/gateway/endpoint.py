"""A model behind any OpenAI-compatible endpoint, where the recorder would be: sessions without tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from sparring.backend.engines.base import SamplingParams
from sparring.backend.gateway.budget import Budget
from sparring.errors import BudgetExhausted, ConfigError, EngineError, GatewayError
from sparring.extras import missing
from sparring.types import ChatClient, ChatReply, Message, StopReason, TokenSequence, ToolCall, Usage

__all__ = ["Endpoint", "EndpointRecord", "EndpointSession"]

_RETRIES = 6  # of the client, which backs off and heeds Retry-After: some two minutes of a limited rate
_CHECK_TIMEOUT_S = 60.0
_HOPELESS = (401, 403, 404, 405)  # no other request will fare better


@dataclass(frozen=True)
class EndpointRecord:
    """What a session leaves behind. An endpoint gives text, so there is nothing to train on."""

    usage: Usage
    messages: tuple[Mapping[str, Any], ...]
    sequences: tuple[TokenSequence, ...] = ()


class Endpoint:
    """Opens sessions with a model behind an endpoint. Everything in it belongs to one event loop.

    Args:
        base_url: with `/v1`, as OpenAI's clients want it.
        api_key: sent to it, and never shown.

    Raises:
        ConfigError: the openai client is not installed.
    """

    def __init__(self, model: str, *, base_url: str, api_key: str, sampling: SamplingParams) -> None:
        if lack := missing(["openai"], "an endpoint"):
            raise ConfigError(lack)
        from openai import AsyncOpenAI

        self.model, self.base_url, self.sampling = model, base_url, sampling
        self._api_key = api_key
        self._client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=_RETRIES)
        self._limit_field = "max_tokens"
        self._sessions: dict[str, EndpointSession] = {}

    async def check(self) -> None:
        """Sample one token, so that a wrong address, key or name is found before the first episode.

        Raises:
            ConfigError: what is wrong, and with which of the three.
        """
        prompt = [{"role": "user", "content": "Hello"}]
        greedy = SamplingParams(max_new_tokens=1, temperature=self.sampling.temperature)
        try:
            client = self._client.with_options(max_retries=1, timeout=_CHECK_TIMEOUT_S)
            await self._create(client, prompt, (), greedy)
        except (EngineError, GatewayError) as error:
            raise ConfigError(str(error)) from error

    def open_session(
        self, session_id: str, *, turn_budget: int, token_budget: int, evaluation: SamplingParams | None = None
    ) -> EndpointSession:
        """As `Recorder.open_session`."""
        if session_id in self._sessions:
            raise GatewayError(f"session {session_id} is already open", status=409, param="session_id")
        budget = Budget(turns=turn_budget, tokens=token_budget)
        session = EndpointSession(self, session_id, evaluation or self.sampling, budget)
        self._sessions[session_id] = session
        return session

    def close_session(self, session_id: str) -> EndpointRecord:
        """End an episode: what it said and cost."""
        return self._sessions.pop(session_id).close()

    async def aclose(self) -> None:
        await self._client.close()

    async def request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> ChatReply:
        """One chat completion.

        Raises:
            BudgetExhausted: the endpoint says that the conversation no longer fits its context or its budgets.
            ConfigError: the endpoint refuses this key, or knows no such model or address.
            EngineError: anything else that went wrong, after retries.
        """
        # Reasoning is left out: endpoints that give it refuse to have it sent back.
        conversation = [replace(message, reasoning=None).to_openai() for message in messages]
        answer = await self._create(self._client, conversation, tools, sampling)
        if not answer.choices:
            raise EngineError(f"{self._name} gave an answer without choices")
        choice = answer.choices[0]
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
            if call.type == "function"
        )
        content = choice.message.content
        counted = answer.usage
        usage = Usage(counted.prompt_tokens, counted.completion_tokens, 1) if counted else Usage(turns=1)
        return ChatReply(Message("assistant", content, calls), content or "", choice.finish_reason, usage)

    async def _create(
        self, client: Any, messages: list[Any], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> Any:
        from openai import APIStatusError, OpenAIError

        fields: dict[str, Any] = {"temperature": sampling.temperature}
        if tools:
            fields["tools"] = list(tools)
        if sampling.top_p != 1:
            fields["top_p"] = sampling.top_p
        if sampling.seed is not None:
            fields["seed"] = sampling.seed
        extra = {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        while True:
            limit = {self._limit_field: sampling.max_new_tokens}
            try:
                return await client.chat.completions.create(
                    model=self.model, messages=messages, extra_body=extra or None, **fields, **limit
                )
            except APIStatusError as error:
                # OpenAI's reasoning models know the limit by another name alone, and say so.
                if self._limit_field == "max_tokens" and "max_completion_tokens" in error.message:
                    self._limit_field = "max_completion_tokens"
                    continue
                self._explain(error)
            except OpenAIError as error:
                cause = error.__cause__ or error
                raise EngineError(self._masked(f"{self._name}: {error} ({type(cause).__name__}: {cause})")) from error

    def _explain(self, error: Any) -> NoReturn:
        """Raise what an answer with an error status means."""
        message = self._masked(f"{self._name}: {error.message}")
        if error.code in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS):  # our own gateway
            raise BudgetExhausted(message, stop_reason=str(error.code)) from error
        if error.code == "context_length_exceeded" or "context length" in message:
            raise BudgetExhausted(message, stop_reason=StopReason.MAX_TOKENS.value) from error
        if error.status_code in _HOPELESS:
            raise ConfigError(f"{message}; are --base-url, the key and the model's name right?") from error
        raise EngineError(message) from error

    @property
    def _name(self) -> str:
        return f"model {self.model!r} at {self.base_url}"

    def _masked(self, message: str) -> str:
        """Some servers repeat the key in their error."""
        return message.replace(self._api_key, "***") if self._api_key else message


class EndpointSession(ChatClient):
    """One episode with the model of an endpoint, made by `Endpoint.open_session`.

    It has no base_url of its own: a program that spoke to the endpoint itself would be held to no budget.
    """

    def __init__(self, endpoint: Endpoint, session_id: str, sampling: SamplingParams, budget: Budget) -> None:
        self._endpoint, self._session_id, self._sampling, self._budget = endpoint, session_id, sampling, budget
        self._usage = Usage()
        self._messages: tuple[Message, ...] = ()
        self._closed = False

    @property
    def base_url(self) -> None:
        return None

    @property
    def api_key(self) -> str:
        return ""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        agent_id: str = "main",
        max_new_tokens: int | None = None,
    ) -> ChatReply:
        """See `ChatClient`; raises as `Endpoint.request` does too."""
        if self._closed:
            raise GatewayError(f"session {self._session_id} has ended: it takes no more requests", status=410)
        limit = min(max_new_tokens or self._sampling.max_new_tokens, self._sampling.max_new_tokens)
        granted = await self._budget.take(limit)
        used: int | None = None
        try:
            sampling = replace(self._sampling, max_new_tokens=granted)
            reply = await self._endpoint.request(messages, tools, sampling)
            used = reply.usage.completion_tokens
        except BudgetExhausted as error:
            if not self._messages:  # the task never fitted: the model has not had its chance
                raise GatewayError(str(error), param="messages") from error
            raise
        finally:
            self._budget.settle(granted, used)
        self._messages = (*messages, reply.message)
        total, more = self._usage, reply.usage
        self._usage = Usage(
            total.prompt_tokens + more.prompt_tokens,
            total.completion_tokens + more.completion_tokens,
            total.turns + more.turns,
        )
        return reply

    def close(self) -> EndpointRecord:
        self._closed = True
        return EndpointRecord(self._usage, tuple(message.to_openai() for message in self._messages))
