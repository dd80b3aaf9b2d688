"""When two spellings of a message are the same message: the keys by which a conversation is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.types import Message

__all__ = ["message_key", "tools_key"]


def message_key(message: Message) -> bytes:
    """Equal for every spelling in which a client may hand one message back.

    Ids and reasoning do not count (SDKs rename and drop them), nor do outer white space, `null` against "", or the
    spaces and key order of tool arguments.
    """
    calls = [(call.name, _canonical_json(call.arguments)) for call in message.tool_calls]
    return _digest([message.role, (message.content or "").strip(), calls])


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    return _digest(list(tools))


def _canonical_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
