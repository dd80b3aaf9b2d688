"""A CAMEL agent that knows nothing of sparring: OPENAI_BASE_URL and OPENAI_API_KEY, a task on its input.

Run it in a virtual environment with camel-ai, whatever environment the training runs in.
"""

import json
import os
import sys

os.environ.setdefault("CAMEL_LOGGING_DISABLED", "true")  # before the import: it logs to standard output

from agent import calculate
from camel.agents import ChatAgent
from camel.messages import BaseMessage, FunctionCallingMessage
from camel.models import OpenAICompatibleModel
from camel.toolkits import FunctionTool
from camel.types import OpenAIBackendRole, RoleType
from camel.utils import BaseTokenCounter


class RoughCounter(BaseTokenCounter):
    """CAMEL's own counter downloads its vocabulary."""

    def count_tokens_from_messages(self, messages: list) -> int:
        return sum(len(str(message.get("content") or "")) // 3 for message in messages)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression (str): numbers, + - * / and parentheses, such as (3 + 4) * 2
    """
    return calculate(expression)


def remember(agent: ChatAgent, message: dict) -> None:
    """Put a message of the task's worked example into the agent's memory."""
    role, text = message["role"], message.get("content") or ""
    if role == "tool":
        result = {"func_name": message["name"], "result": text, "tool_call_id": message["tool_call_id"]}
        said = FunctionCallingMessage("tool", RoleType.ASSISTANT, None, "", **result)
        agent.update_memory(said, OpenAIBackendRole.FUNCTION)
    elif role == "assistant":
        said = BaseMessage("assistant", RoleType.ASSISTANT, {"tool_calls": message.get("tool_calls")}, text)
        agent.update_memory(said, OpenAIBackendRole.ASSISTANT)
    else:
        agent.update_memory(BaseMessage("user", RoleType.USER, None, text), OpenAIBackendRole.USER)


def main() -> None:
    system, *examples, question = json.load(sys.stdin)["messages"]
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = OpenAICompatibleModel("gpt-4o-mini", url=url, api_key=key, token_counter=RoughCounter())
    agent = ChatAgent(system["content"], model=model, tools=[FunctionTool(calculator)], max_iteration=8)
    for message in examples:
        remember(agent, message)
    print(agent.step(question["content"]).msgs[0].content)


if __name__ == "__main__":
    main()
