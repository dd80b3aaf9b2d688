"""The simulated customer: a model's failures are the infrastructure's, and it sees its own side alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sparring.envs.tau2.transcript import Call, Entry, user_view
from sparring.envs.tau2.user import ModelUser, OpenAIModel, UserSide
from sparring.errors import ConfigError, EngineError
from sparring.types import ChatReply, Message, ToolCall


class Answers:
    """A model that gives what it was made with, one after the other; an exception is raised."""

    def __init__(self, *answers: Message | Exception | None) -> None:
        self._answers = list(answers)
        self.asked: list[Sequence[Message]] = []

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> ChatReply:
        self.asked.append(messages)
        answer = self._answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return ChatReply(answer, answer.content or "", "stop")


SIDE = UserSide(None, "You are a customer.", [Message("user", "Hi!")], [], 0)
EMPTY = Message("assistant", "  ")


async def test_the_model_is_asked_under_the_users_prompt() -> None:
    model = Answers(Message("assistant", "I want a refund."))
    entry = await ModelUser(model)(SIDE)
    assert (entry.role, entry.content, entry.calls) == ("user", "I want a refund.", ())
    assert model.asked == [[Message("system", "You are a customer."), Message("user", "Hi!")]]


async def test_a_call_is_the_users() -> None:
    reply = Message("assistant", tool_calls=(ToolCall("c1", "reboot", "{}"),))
    assert (await ModelUser(Answers(reply))(SIDE)).calls == (Call("c1", "reboot", {}, "user"),)


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", "nonsense"])
async def test_empty_and_malformed_answers_are_asked_for_again(arguments: str) -> None:
    malformed = Message("assistant", tool_calls=(ToolCall("c1", "reboot", arguments),))
    entry = await ModelUser(Answers(EMPTY, malformed, Message("assistant", "Hello.")))(SIDE)
    assert entry.content == "Hello."


async def test_only_empty_answers_are_a_failure() -> None:
    with pytest.raises(EngineError, match="4 empty or malformed answers"):
        await ModelUser(Answers(*[EMPTY] * 4))(SIDE)


async def test_a_client_that_raises_is_a_failure() -> None:
    with pytest.raises(EngineError, match="ConnectionError: refused"):
        await ModelUser(Answers(ConnectionError("refused")))(SIDE)


async def test_a_client_that_hangs_is_a_failure() -> None:
    with pytest.raises(EngineError, match=r"did not answer within 0\.01 s"):
        await ModelUser(Answers(None), timeout_s=0.01)(SIDE)


def test_the_user_does_not_see_the_agents_calls() -> None:
    entries = [
        Entry("assistant", "Hi!"),
        Entry("user", "My phone is broken."),
        Entry("assistant", None, (Call("a1", "get_customer", {}),)),
        Entry("tool", "secret", call_id="a1"),
        Entry("assistant", "Reboot it."),
        Entry("user", None, (Call("u1", "reboot", {}, "user"),)),
        Entry("tool", "rebooted", call_id="u1", requestor="user"),
    ]
    assert user_view(entries) == [
        Message("user", "Hi!"),
        Message("assistant", "My phone is broken."),
        Message("user", "Reboot it."),
        Message("assistant", None, (ToolCall("u1", "reboot", "{}"),)),
        Message("tool", "rebooted", tool_call_id="u1"),
    ]


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        OpenAIModel("gpt-4.1", api_key_env="NO_SUCH_KEY")
