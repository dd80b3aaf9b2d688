"""Messages and tools as OpenAI's chat completions spell them, in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import GatewayError
from sparring.types import Message, ToolCall

__all__ = ["read_messages", "stop_strings", "text_of", "tool_choice_of"]

_MOST_STOPS = 64

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """
    Raises:
        GatewayError: which message cannot be read, and why.
    """
    if not messages:
        raise GatewayError("messages: at least one message is needed", param="messages")
    return tuple(_read_message(f"messages[{index}]", message) for index, message in enumerate(messages))


def _read_message(where: str, message: Mapping[str, Any]) -> Message:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise GatewayError(f"{where}.role is one of {', '.join(_ROLES)}", param=f"{where}.role")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise GatewayError(f"{where}.tool_calls is a list of calls", param=f"{where}.tool_calls")
    return Message(
        role,  # type: ignore[arg-type]  # a value of the table above
        content=text_of(message.get("content"), f"{where}.content"),
        tool_calls=tuple(_read_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)),
        tool_call_id=_optional_text(message.get("tool_call_id")),
        name=_optional_text(message.get("name")),
        reasoning=_optional_text(message.get("reasoning_content") or message.get("reasoning")),
    )


def text_of(content: Any, where: str) -> str | None:
    """The text of a message's content: a string, a list of text parts, or nothing.

    Raises:
        GatewayError: a part that is no text: the models here read text alone.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise GatewayError(f"{where} is a string or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise GatewayError(
                f"{where}[{index}]: a part of type {kind!r} cannot be read: this model takes text alone",
                param=f"{where}[{index}]",
            )
        texts.append(text)
    return "".join(texts)


def stop_strings(stops: str | Sequence[str] | None, field: str) -> tuple[str, ...]:
    """
    Raises:
        GatewayError: an empty string, which would end every answer at once, or more strings than anyone means.
    """
    found = (stops,) if isinstance(stops, str) else tuple(stops or ())
    if not all(found) or len(found) > _MOST_STOPS:
        raise GatewayError(f"{field}: at most {_MOST_STOPS} strings, and none of them empty", param=field)
    return found


def tool_choice_of(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """`ChatRequest.tool_choice` for what a client wrote.

    Raises:
        GatewayError: a choice that names no tool of the request.
    """
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice in ("auto", "none", "required"):
            return choice
    elif isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if any(tool["function"]["name"] == name for tool in tools):
            return str(name)
    raise GatewayError(f"tool_choice: {json.dumps(choice)} names no tool of this request", param="tool_choice")


def _read_call(where: str, call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise GatewayError(f"{where}.function needs a name", param=f"{where}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # some clients send the object itself
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall(str(call.get("id") or ""), function["name"], arguments)


def _optional_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
