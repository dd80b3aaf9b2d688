"""CAMEL's side of the gateway: a model backend that enters what it hears into the environment, and agents' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from camel.agents import ChatAgent
from camel.messages import BaseMessage, FunctionCallingMessage
from camel.models import OpenAICompatibleModel
from camel.types import OpenAIBackendRole, RoleType
from camel.utils import BaseTokenCounter
from openai.types.chat import ChatCompletion

from sparring.envs import ChatEnv
from sparring.types import AGENT_HEADER, Message, ToolCall

__all__ = ["EpisodeOver", "GatewayModel", "Table", "TokenEstimate", "remember"]


class EpisodeOver(Exception):
    """Stops an agent whose episode has ended."""


class Table:
    """Where the acting agent's answers are entered into the environment."""

    def __init__(self, env: ChatEnv) -> None:
        self.env = env
        self.text: str | None = None

    async def enter(self, said: Any) -> None:
        calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in said.tool_calls or ())
        self.text = said.content
        await self.env.observe(Message("assistant", said.content, calls))


class TokenEstimate(BaseTokenCounter):
    """CAMEL's own counter downloads data; the recorder counts exactly, so an estimate is enough here."""

    def count_tokens_from_messages(self, messages: Sequence[Any]) -> int:
        return sum(len(str(message.get("content") or "")) // 3 for message in messages)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


class GatewayModel(OpenAICompatibleModel):
    """The gateway's model for one agent; with a table, that of the agent that acts in the environment."""

    def __init__(self, table: Table | None, agent_id: str, url: str, api_key: str) -> None:
        headers = {AGENT_HEADER: agent_id}
        super().__init__("policy", api_key=api_key, url=url, token_counter=TokenEstimate(), default_headers=headers)
        self._table = table

    async def _arun(self, *args: Any, **kwargs: Any) -> Any:
        if self._table is not None and self._table.env.done:
            raise EpisodeOver
        answer = await super()._arun(*args, **kwargs)
        if self._table is not None and isinstance(answer, ChatCompletion):
            await self._table.enter(answer.choices[0].message)
        return answer


def remember(agent: ChatAgent, message: Message) -> None:
    """Put a worked example of the environment into the agent's memory."""
    text = message.content or ""
    if message.role == "tool":
        result = {"func_name": message.name, "result": text, "tool_call_id": message.tool_call_id}
        spoken = FunctionCallingMessage("tool", RoleType.ASSISTANT, None, "", **result)
        agent.update_memory(spoken, OpenAIBackendRole.FUNCTION)
    elif message.role == "assistant":
        calls = [call.to_openai() for call in message.tool_calls]
        spoken = BaseMessage("assistant", RoleType.ASSISTANT, {"tool_calls": calls} if calls else None, text)
        agent.update_memory(spoken, OpenAIBackendRole.ASSISTANT)
    else:
        agent.update_memory(BaseMessage("user", RoleType.USER, None, text), OpenAIBackendRole.USER)
