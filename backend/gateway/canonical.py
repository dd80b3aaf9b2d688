"""When two spellings of a message are the same message: the keys by which a conversation is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.types import Message

__all__ = ["message_key", "restored", "root_key"]


def message_key(message: Message) -> bytes:
    """Equal for every spelling in which a client may hand one message back.

    Ids and reasoning do not count (SDKs rename and drop them), nor do outer white space, `null` against "", or the
    spaces and key order of tool arguments.
    """
    calls = [(call.name, _canonical_json(call.arguments)) for call in message.tool_calls]
    return _digest([message.role, (message.content or "").strip(), calls])


def root_key(policy_id: str, tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Conversations with other tools, or another model, have nothing in common."""
    return _digest([policy_id, list(tools)])


def restored(messages: Sequence[Message], said_with: Callable[[str], Message | None]) -> tuple[Message, ...]:
    """The messages with every answer as it was given, where a client's own bookkeeping took it apart.

    Some SDKs drop the text beside tool calls, and some hand parallel calls back as one message each. The ids of calls
    tell which answer they come from; a call that was changed is left as it is.

    Args:
        said_with: the answer that made the call of an id, if one did.
    """
    whole: list[Message] = []
    placed: dict[int, set[str]] = {}  # ids handed back so far, by the identity of the answer they are from
    for message in messages:
        said = said_with(message.tool_calls[0].id) if message.role == "assistant" and message.tool_calls else None
        if said is None or not _is_part(message, said):
            whole.append(message)
            continue
        ids = {call.id for call in message.tool_calls}
        seen = placed.get(id(said), set())
        if not seen or ids & seen:  # the first part of an answer, or the same answer once more
            placed[id(said)] = ids
            whole.append(said)
        else:
            seen |= ids
    return tuple(whole)


def _is_part(message: Message, said: Message) -> bool:
    """Whether a message is an answer, or what is left of it after its text or some of its calls were taken away."""
    calls = {call.id: call for call in said.tool_calls}
    return (message.content or "").strip() in ("", (said.content or "").strip()) and all(
        call.id in calls
        and call.name == calls[call.id].name
        and _canonical_json(call.arguments) == _canonical_json(calls[call.id].arguments)
        for call in message.tool_calls
    )


def _canonical_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text or "{}", parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _number(text: str) -> float:
    """JavaScript writes 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
