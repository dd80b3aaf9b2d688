"""Any agent of the OpenAI Agents SDK as a policy: its handoffs, its own tools, and the environment's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import openai
from agents import Agent, FunctionTool, ModelResponse, RunConfig, RunHooks, Runner
from agents.exceptions import AgentsException, MaxTurnsExceeded, ModelBehaviorError
from agents.models.openai_provider import OpenAIProvider
from agents.tool_context import ToolContext

from sparring.agents.openai_client import session_client
from sparring.agents.openai_items import input_items, said_message
from sparring.agents.policy import Outcome
from sparring.agents.remote import budget_error, opening
from sparring.envs import ChatEnv
from sparring.types import AGENT_HEADER, ChatClient, StopReason

__all__ = ["OpenAIAgentsPolicy"]

AgentFactory = Callable[[Sequence[FunctionTool]], Agent[Any]]


class OpenAIAgentsPolicy:
    """Plays an environment by an agent that is handed the gateway's base_url and key, and nothing else.

    Args:
        agent: an `Agent`, which gets the environment's tools beside its own, or a factory that takes these tools and
            builds a graph of agents for one episode. An agent without instructions gets the environment's.
        worked_examples: whether what the environment says before the task's own message comes with it.
        use_responses: by the responses API, the SDK's own default; else by chat completions.
    """

    def __init__(
        self, agent: Agent[Any] | AgentFactory, *, worked_examples: bool = True, use_responses: bool = True
    ) -> None:
        self._agent, self._worked_examples, self._use_responses = agent, worked_examples, use_responses

    async def play(self, env: ChatEnv, client: ChatClient) -> Outcome:
        async with session_client(client) as api:
            provider = OpenAIProvider(openai_client=api, use_responses=self._use_responses)
            try:
                answer = await self._run(env, provider)
            except (openai.APIStatusError, AgentsException) as error:
                if (budget := budget_error(error)) is not None:
                    raise budget from error
                raise
        return Outcome(env.stop_reason or StopReason.ABORTED, answer, env.failure)

    async def _run(self, env: ChatEnv, provider: OpenAIProvider) -> str | None:
        system, messages = opening(env.messages)
        agent = self._make_agent(env, system)
        shown = messages if self._worked_examples else messages[-1:]
        items: list[Any] = [item for message in shown for item in input_items(message)]
        hooks = _Hooks(env)

        async def unknown_tool(error: Any) -> str | None:
            return await env.call_tool(error.tool_name, "{}") if error.kind == "tool_not_found" else None

        config = RunConfig(
            model="policy",
            model_provider=provider,
            tracing_disabled=True,
            tool_not_found_behavior="return_error_to_model",
            tool_error_formatter=unknown_tool,
        )
        while not env.done:
            try:
                await Runner.run(agent, items, hooks=hooks, run_config=config, max_turns=env.max_turns + 1)
            except _EpisodeOver:
                break
            except MaxTurnsExceeded:
                env.truncate(StopReason.MAX_TURNS)
                break
            except ModelBehaviorError:
                pass  # an answer that the SDK could not read: the environment says what was wrong with it
            observation = await env.finish(hooks.text)
            items = [*hooks.items, {"role": "user", "content": observation or ""}]
            agent = hooks.agent or agent
        return hooks.text

    def _make_agent(self, env: ChatEnv, system: str | None) -> Agent[Any]:
        tools = [_function_tool(env, tool["function"]) for tool in env.tools]
        if isinstance(self._agent, Agent):
            agent = self._agent.clone(tools=[*self._agent.tools, *tools])
        else:
            agent = self._agent(tools)
        if agent.instructions is None:
            agent = agent.clone(instructions=system)
        _label(agent, set())
        return agent


class _EpisodeOver(Exception):
    """Stops an agent whose episode has ended."""


class _Hooks(RunHooks[Any]):
    """Enters each answer into the environment, and remembers where the conversation stands."""

    def __init__(self, env: ChatEnv) -> None:
        self._env = env
        self.agent: Agent[Any] | None = None
        self.items: list[Any] = []
        self.text: str | None = None

    async def on_llm_start(
        self, context: Any, agent: Agent[Any], system_prompt: str | None, input_items: list[Any]
    ) -> None:
        if self._env.done:
            raise _EpisodeOver
        self.agent, self.items = agent, list(input_items)

    async def on_llm_end(self, context: Any, agent: Agent[Any], response: ModelResponse) -> None:
        self.items += response.to_input_items()
        message = said_message(response)
        self.text = message.content
        await self._env.observe(message)


def _label(agent: Agent[Any], done: set[int]) -> None:
    """Have every agent that this one may hand over to say its name to the gateway."""
    if id(agent) in done:
        return
    done.add(id(agent))
    headers = {**(agent.model_settings.extra_headers or {}), AGENT_HEADER: quote(agent.name)}
    agent.model_settings = replace(agent.model_settings, extra_headers=headers)
    for other in agent.handoffs:
        if isinstance(other, Agent):
            _label(other, done)


def _function_tool(env: ChatEnv, function: dict[str, Any]) -> FunctionTool:
    async def invoke(context: ToolContext[Any], arguments: str) -> str:
        return await env.call_tool(function["name"], arguments)

    return FunctionTool(
        name=function["name"],
        description=function.get("description", ""),
        params_json_schema=function["parameters"],
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )
