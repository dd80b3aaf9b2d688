"""Who plays the agent in `benchmarks.tau2`: the gold agent, one that does nothing, an endpoint, or a local model."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from sparring.envs.tau2 import GoldAgent, OpenAIModel, Tau2Env
from sparring.errors import BudgetExhausted, EngineError
from sparring.types import Message, StopReason, Usage

Say = Callable[[], Awaitable[tuple[Message | None, Usage]]]
"""The agent's next message in one episode, and what it cost; None where the agent's own budget ran out."""
Agent = Callable[[Tau2Env], AbstractContextManager[Say]]
"""Plays the agent in one episode, from entering to leaving."""

_REFUSAL = "I am sorry, I cannot help you with that."
_TOKENS_A_TURN = 256


@contextmanager
def gold_agent(env: Tau2Env) -> Iterator[Say]:
    agent = GoldAgent(env.task, solo=env.domain.solo)

    async def say() -> tuple[Message, Usage]:
        return agent.next_message(), Usage()

    yield say


@contextmanager
def idle_agent(env: Tau2Env) -> Iterator[Say]:
    async def say() -> tuple[Message, Usage]:
        return Message("assistant", _REFUSAL), Usage()

    yield say


def endpoint_agent(model: OpenAIModel) -> Agent:
    @contextmanager
    def agent(env: Tau2Env) -> Iterator[Say]:
        async def say() -> tuple[Message, Usage]:
            try:
                reply = await model.chat(env.messages, env.tools)
            except Exception as error:  # the client has retried already
                raise EngineError(f"the agent's endpoint failed: {type(error).__name__}: {error}") from error
            return reply.message, reply.usage

        yield say

    return agent


@asynccontextmanager
async def local_agent(
    path: str, *, tool_template: str | None, temperature: float, max_length: int, max_turns: int, seed: int
) -> AsyncIterator[Agent]:
    """A model of this machine, behind the embedded engine and the gateway that training uses."""
    from sparring.backend.engines.base import SamplingParams
    from sparring.backend.engines.process_engine import ProcessEngine
    from sparring.backend.gateway import ChatFormat, Recorder
    from sparring.backend.models import resolve_model

    folder = resolve_model(path)
    chat = ChatFormat.load(folder, tool_template=tool_template)
    engine = ProcessEngine(folder, max_length=max_length, seed=seed)
    sampling = SamplingParams(max_new_tokens=_TOKENS_A_TURN, temperature=temperature)
    recorder = Recorder(engine, chat, sampling, max_length=max_length)
    numbers = itertools.count()

    @contextmanager
    def agent(env: Tau2Env) -> Iterator[Say]:
        name = f"episode-{next(numbers)}"
        session = recorder.open_session(name, turn_budget=max_turns, token_budget=max_length, evaluation=sampling)

        async def say() -> tuple[Message | None, Usage]:
            try:
                reply = await session.chat(env.messages, env.tools)
            except BudgetExhausted as error:
                env.truncate(StopReason(error.stop_reason))
                return None, Usage()
            return reply.message, reply.usage

        try:
            yield say
        finally:
            recorder.close_session(name)

    await engine.start()
    try:
        yield agent
    finally:
        await recorder.aclose()
        await engine.stop()


def user_argument(model: str | None, base_url: str | None, api_key_env: str) -> Any:
    """The `user` argument of `Tau2Env`."""
    if model is None:
        return "scripted"
    return {"model": model, "base_url": base_url, "api_key_env": api_key_env}
