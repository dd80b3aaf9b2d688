"""Content blocks of Anthropic's messages, to messages and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import GatewayError
from sparring.types import Message, ToolCall

__all__ = ["content_blocks", "read_conversation"]


def read_conversation(system: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """
    Raises:
        GatewayError: which block cannot be read, and why.
    """
    if not messages:
        raise GatewayError("messages: at least one message is needed", param="messages")
    read: list[Message] = []
    if system:
        read.append(Message("system", _text("system", system)))
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role not in ("user", "assistant") or not isinstance(blocks, list):
            raise GatewayError(f"{where} has a role, user or assistant, and content", param=where)
        if not all(isinstance(block, Mapping) for block in blocks):
            raise GatewayError(f"{where}.content is a string or a list of blocks", param=f"{where}.content")
        read += _read_user(where, blocks) if role == "user" else [_read_assistant(where, blocks)]
    return tuple(read)


def content_blocks(message: Message) -> list[dict[str, Any]]:
    """Thinking, text and tool uses of an answer, in this order."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    uses = (
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in message.tool_calls
    )
    return [*blocks, *uses]


def _read_user(where: str, blocks: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Tool results are messages of their own, in the order of the blocks; texts that follow one another are one."""
    read: list[Message] = []
    for index, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            text = _text(f"{where}.content[{index}]", block.get("content") or "")
            read.append(Message("tool", text, tool_call_id=str(block.get("tool_use_id") or "")))
            continue
        text = _text(f"{where}.content[{index}]", [block])
        if read and read[-1].role == "user":
            text = f"{read.pop().content}{text}"
        read.append(Message("user", text))
    return read or [Message("user", "")]


def _read_assistant(where: str, blocks: Sequence[Mapping[str, Any]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use" and isinstance(block.get("name"), str):
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(ToolCall(str(block.get("id") or ""), block["name"], arguments))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text(f"{where}.content[{index}]", [block]))
    return Message("assistant", "".join(texts), tuple(calls), reasoning="".join(thoughts) or None)


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(f"{where} is a string or a list of text blocks", param=where)
    texts = []
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, Mapping) else None
            raise GatewayError(
                f"{where}: a block of type {kind!r} cannot be read: this model takes text alone", param=where
            )
        texts.append(block["text"])
    return "".join(texts)
