"""The simulated customer: who it is, what it sees, and a model in its place.

A user is an async function of its side of the conversation, without state of its own, as upstream's is. Its failures
are failures of the infrastructure: they end the episode without a reward.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sparring.envs.tau2.transcript import Call, Entry
from sparring.errors import ConfigError, EngineError
from sparring.extras import missing
from sparring.types import ChatReply, Message, ToolCall, Usage

__all__ = ["STOP_WORDS", "ChatModel", "ModelUser", "OpenAIModel", "User", "UserSide"]

STOP_WORDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")  # in a text of the user, they end the conversation


@dataclass(frozen=True)
class UserSide:
    """What the user knows when it is its turn.

    Attributes:
        task: upstream's `Task`; a model must see no more of it than `system` says.
        system: upstream's user prompt with the task's scenario.
        messages: the conversation with the roles turned round: the agent's texts are "user", its own are "assistant".
            The agent's tool calls are not in it.
        tools: OpenAI schemas of the user's own tools.
        seed: of the episode.
    """

    task: Any
    system: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    seed: int


User = Callable[[UserSide], Awaitable[Entry]]


class ChatModel(Protocol):
    """Anything with `chat`: a gateway session, `OpenAIModel`, or a function in a test's own class."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> ChatReply: ...


class ModelUser:
    """A model plays the customer, under upstream's prompt.

    An empty answer is asked for again, as upstream does; so is a call whose arguments are not JSON, on which upstream
    ends.
    """

    def __init__(self, model: ChatModel, *, attempts: int = 4, timeout_s: float = 120.0) -> None:
        self._model = model
        self._attempts = attempts
        self._timeout_s = timeout_s

    async def __call__(self, side: UserSide) -> Entry:
        """The user's next message.

        Raises:
            EngineError: the model failed, was too slow, or gave nothing that can be used.
        """
        conversation = [Message("system", side.system), *side.messages]
        chat = self._model.chat
        if isinstance(self._model, OpenAIModel):
            chat = partial(self._model.chat, seed=side.seed)
        for _ in range(self._attempts):
            try:
                reply = await asyncio.wait_for(chat(conversation, side.tools), self._timeout_s)
            except TimeoutError as error:
                raise EngineError(
                    f"the user simulator did not answer within {self._timeout_s:g} s; is its endpoint overloaded?"
                ) from error
            except Exception as error:
                raise EngineError(f"the user simulator failed: {type(error).__name__}: {error}") from error
            entry = _entry(reply)
            if entry is not None:
                return entry
        raise EngineError(f"the user simulator gave {self._attempts} empty or malformed answers in a row")


def _entry(reply: ChatReply) -> Entry | None:
    """The reply as the user's message; None where it is empty or has arguments that are no JSON object."""
    made = []
    for call in reply.message.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            return None
        if not isinstance(arguments, dict):
            return None
        made.append(Call(call.id, call.name, arguments, "user"))
    usage = {"prompt_tokens": reply.usage.prompt_tokens, "completion_tokens": reply.usage.completion_tokens}
    entry = Entry("user", reply.message.content, tuple(made), usage=usage)
    return entry if entry.calls or entry.has_text else None


class OpenAIModel:
    """A model behind an OpenAI-compatible endpoint.

    Args:
        api_key_env: the environment variable with the key, so that no key stands in a configuration file.
        more: further request fields, such as `max_tokens`.
    """

    def __init__(
        self, model: str, *, base_url: str | None = None, api_key_env: str = "OPENAI_API_KEY", temperature: float = 0.0,
        max_retries: int = 3, **more: Any,
    ) -> None:  # fmt: skip
        if lack := missing(["openai"], "a model as the user"):
            raise ConfigError(lack)
        from openai import AsyncOpenAI

        if "api_key" in more:
            raise ConfigError("put the key into an environment variable and name it by api_key_env")
        self.name = model
        key = os.environ.get(api_key_env)
        if key is None and base_url is None:
            raise ConfigError(f"the user model {model!r} needs a key in the environment variable {api_key_env}")
        self._make_client = partial(AsyncOpenAI, base_url=base_url, api_key=key or "none", max_retries=max_retries)
        # Connections belong to an event loop; a loop that is gone takes its client with it.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()
        self._fields = {"temperature": temperature, **more}

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, seed: int | None = None
    ) -> ChatReply:
        """One chat completion. Raises what the client raises."""
        fields: dict[str, Any] = dict(self._fields)
        if seed is not None:
            fields.setdefault("seed", seed)
        if tools:
            fields |= {"tools": list(tools), "tool_choice": "auto"}
        conversation: list[Any] = [message.to_openai() for message in messages]
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop) or self._clients.setdefault(loop, self._make_client())
        answer = await client.chat.completions.create(model=self.name, messages=conversation, **fields)
        choice = answer.choices[0]
        asked: list[Any] = list(choice.message.tool_calls or ())
        made = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in asked)
        counted = answer.usage
        usage = Usage(counted.prompt_tokens, counted.completion_tokens, 1) if counted else Usage(turns=1)
        message = Message("assistant", choice.message.content, made)
        return ChatReply(message, choice.message.content or "", choice.finish_reason, usage)
