"""What was said and done in one conversation, by both sides, and what each side sees of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparring.types import Message, ToolCall

__all__ = ["Call", "Entry", "agent_view", "calls", "entries_of", "user_view"]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call, its arguments parsed."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    requestor: Literal["assistant", "user"] = "assistant"


@dataclass(frozen=True, slots=True)
class Entry:
    """One message: of the agent, of the user, or a tool's answer to `call_id` of `requestor`.

    Attributes:
        usage: prompt and completion tokens of the model call behind it, where known.
        cost: in dollars, where known.
    """

    role: Literal["assistant", "user", "tool"]
    content: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    requestor: Literal["assistant", "user"] = "assistant"
    error: bool = False
    usage: Mapping[str, int] | None = None
    cost: float | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content and self.content.strip())


def calls(entries: Iterable[Entry]) -> Iterator[Call]:
    """Every tool call, of the agent and of the user, in order."""
    for entry in entries:
        yield from entry.calls


def entries_of(messages: Iterable[Any]) -> list[Entry]:
    """Upstream's messages as entries. System messages are left out: the conversation has none."""
    entries = []
    for message in messages:
        if message.role == "tool":
            entries.append(Entry("tool", message.content, (), message.id, message.requestor, message.error))
        elif message.role in ("assistant", "user"):
            made = tuple(Call(c.id, c.name, c.arguments, c.requestor) for c in message.tool_calls or ())
            entries.append(Entry(message.role, message.content, made, usage=message.usage, cost=message.cost))
    return entries


def agent_view(entries: Iterable[Entry]) -> list[Message]:
    """The conversation as the agent sees it: without the user's calls and what they returned."""
    messages = []
    for entry in entries:
        if entry.role == "assistant":
            messages.append(Message("assistant", entry.content, _tool_calls(entry)))
        elif entry.role == "user" and not entry.calls:
            messages.append(Message("user", entry.content))
        elif entry.role == "tool" and entry.requestor == "assistant":
            messages.append(Message("tool", entry.content, tool_call_id=entry.call_id))
    return messages


def user_view(entries: Iterable[Entry]) -> list[Message]:
    """The conversation as the user sees it, the roles turned round: without the agent's calls and their results."""
    messages = []
    for entry in entries:
        if entry.role == "user":
            messages.append(Message("assistant", entry.content, _tool_calls(entry)))
        elif entry.role == "assistant" and not entry.calls:
            messages.append(Message("user", entry.content))
        elif entry.role == "tool" and entry.requestor == "user":
            messages.append(Message("tool", entry.content, tool_call_id=entry.call_id))
    return messages


def _tool_calls(entry: Entry) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.id, call.name, json.dumps(call.arguments)) for call in entry.calls)
