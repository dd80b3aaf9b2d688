"""What was said and done in one conversation, by both sides; the agent's view of it is `ChatEnv.messages`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Call", "Entry", "calls", "entries_of"]


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
