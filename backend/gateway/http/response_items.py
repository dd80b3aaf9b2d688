"""Items of the responses API, to messages and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.backend.gateway.http.openai_messages import read_messages, text_of
from sparring.backend.gateway.request import RecordedReply
from sparring.errors import GatewayError
from sparring.types import Message, ToolCall

__all__ = ["output_items", "read_input"]


def read_input(items: str | Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages that a list of items stands for: what one answer was split into becomes one message again.

    Raises:
        GatewayError: an item of a kind that cannot be read here.
    """
    if isinstance(items, str):
        return (Message("user", items),)
    messages: list[Message] = []
    answer: Message | None = None  # the assistant message whose items are being collected
    for index, item in enumerate(items):
        part = _assistant_part(f"input[{index}]", item)
        if part is not None:
            joined = _join(answer, part)
            if joined is None:
                messages.append(answer)  # type: ignore[arg-type]  # `_join` refuses none but a message
            answer = joined or part
            continue
        if answer is not None:
            messages.append(answer)
            answer = None
        messages.append(_other(f"input[{index}]", item))
    return (*messages, answer) if answer is not None else tuple(messages)


def output_items(reply: RecordedReply, *, status: str) -> list[dict[str, Any]]:
    """Reasoning, text and function calls of an answer, in this order."""
    message, name = reply.message, reply.interaction_id
    items: list[dict[str, Any]] = []
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content or "", "annotations": [], "logprobs": []}
        text = {"type": "message", "id": f"msg_{name}", "status": status, "role": "assistant", "content": [part]}
        items.append(text)
    for number, call in enumerate(message.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{number}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def _assistant_part(where: str, item: Mapping[str, Any]) -> Message | None:
    """What an item adds to an assistant message, or None where it is no part of one."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        parts = [part for name in ("content", "summary") if isinstance(item.get(name), list) for part in item[name]]
        texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        return Message("assistant", reasoning="\n".join(texts))
    if kind == "function_call":
        if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
            raise GatewayError(f"{where}: a function_call has a name, and arguments as a string", param=where)
        call = ToolCall(str(item.get("call_id") or ""), item["name"], item["arguments"])
        return Message("assistant", tool_calls=(call,))
    if kind == "message" and item.get("role") == "assistant":
        return Message("assistant", content=text_of(item.get("content"), f"{where}.content") or "")
    return None


def _join(answer: Message | None, part: Message) -> Message | None:
    """One answer's items are reasoning, text, calls; None where `part` begins another answer."""
    if answer is None:
        return part
    if part.tool_calls:
        return replace(answer, tool_calls=answer.tool_calls + part.tool_calls)
    if answer.content is not None or answer.tool_calls or part.reasoning is not None:
        return None
    return replace(part, reasoning=answer.reasoning)


def _other(where: str, item: Mapping[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        try:
            return read_messages([item])[0]
        except GatewayError as error:
            raise GatewayError(str(error).replace("messages[0]", where), param=where) from error
    if kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else text_of(output, f"{where}.output")
        return Message("tool", text or "", tool_call_id=str(item.get("call_id") or ""))
    raise GatewayError(f"{where}: items of type {json.dumps(kind)} cannot be read", param=f"{where}.type")
