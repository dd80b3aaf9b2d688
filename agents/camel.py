"""CAMEL agents as policies: a `ChatAgent`, or a society of two that play roles. Needs a virtual environment of its own.

camel-ai and openai-agents cannot share one: see `BlackBoxPolicy` for a CAMEL agent beside any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from camel.agents import ChatAgent
from camel.models import BaseModelBackend
from camel.societies import RolePlaying
from camel.toolkits import FunctionTool

from sparring.agents.camel_model import EpisodeOver, GatewayModel, Table, remember
from sparring.agents.policy import Outcome
from sparring.agents.remote import budget_error, opening, served_at
from sparring.envs import ChatEnv
from sparring.types import ChatClient, Message, StopReason

__all__ = ["Brief", "CamelPolicy", "chat_agent"]

_DONE = "CAMEL_TASK_DONE"


@dataclass(frozen=True)
class Brief:
    """What an agent for one episode is built from.

    Attributes:
        system, task: the environment's system prompt, and its latest message.
        model_of: a model for each agent's name. "main" acts in the environment: in a society, the assistant.
        tools: the environment's.
    """

    system: str | None
    task: str
    model_of: Callable[[str], BaseModelBackend]
    tools: list[FunctionTool]


def chat_agent(brief: Brief) -> ChatAgent:
    return ChatAgent(brief.system, model=brief.model_of("main"), tools=list(brief.tools))


class CamelPolicy:
    """Plays an environment by an agent, or a society, that is handed the gateway's base_url and key.

    Args:
        make_agent: builds what plays one episode.
        rounds: of a society, at most; what its assistant said last is its answer.
    """

    def __init__(
        self, make_agent: Callable[[Brief], ChatAgent | RolePlaying] = chat_agent, *, rounds: int = 10
    ) -> None:
        self._make_agent, self._rounds = make_agent, rounds

    async def play(self, env: ChatEnv, client: ChatClient) -> Outcome:
        system, messages = opening(env.messages)
        table = Table(env)

        def model_of(agent_id: str) -> BaseModelBackend:
            return GatewayModel(table if agent_id == "main" else None, agent_id, served_at(client), client.api_key)

        tools = [_tool(env, tool) for tool in env.tools]
        made = self._make_agent(Brief(system, env.messages[-1].content or "", model_of, tools))
        try:
            if isinstance(made, RolePlaying):
                await self._play_society(env, made, table)
            else:
                await _play_agent(env, made, messages, table)
        except EpisodeOver:
            pass
        except Exception as error:
            if (budget := budget_error(error)) is not None:
                raise budget from error
            raise
        return Outcome(env.stop_reason or StopReason.ABORTED, table.text, env.failure)

    async def _play_society(self, env: ChatEnv, society: RolePlaying, table: Table) -> None:
        message = await society.ainit_chat()
        answer: str | None = None
        for _ in range(self._rounds):
            assistant, user = await society.astep(message)
            if user.terminated or _DONE in user.msg.content:
                break
            answer = table.text
            if assistant.terminated or not assistant.msgs:
                break
            message = assistant.msg
        await env.finish(answer)
        env.truncate(StopReason.FINISHED)


async def _play_agent(env: ChatEnv, agent: ChatAgent, messages: Sequence[Message], table: Table) -> None:
    *examples, task = messages
    for message in examples:
        remember(agent, message)
    text = task.content or ""
    while not env.done:
        await agent.astep(text)
        text = await env.finish(table.text) or ""


def _tool(env: ChatEnv, schema: dict[str, Any]) -> FunctionTool:
    async def call(**arguments: Any) -> str:
        return await env.call_tool(schema["function"]["name"], arguments)

    return FunctionTool(call, openai_tool_schema=schema)
