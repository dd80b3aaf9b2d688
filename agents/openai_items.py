"""Messages as the OpenAI Agents SDK holds them: items of the responses API, whichever API it then speaks."""

from __future__ import annotations

from typing import Any

from agents import ModelResponse

from sparring.types import Message, ToolCall

__all__ = ["input_items", "said_message"]


def input_items(message: Message) -> list[dict[str, Any]]:
    """A message of the environment as items of an agent's input."""
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content or ""}]
    calls = [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    ]
    return [*([{"role": message.role, "content": message.content}] if message.content else []), *calls]


def said_message(response: ModelResponse) -> Message:
    """The assistant message in a model's answer."""
    said = [item for item in response.output if item.type == "message"]
    texts = [part.text for item in said for part in item.content if part.type == "output_text"]
    calls = tuple(
        ToolCall(item.call_id, item.name, item.arguments) for item in response.output if item.type == "function_call"
    )
    return Message("assistant", "".join(texts) or None, calls)
