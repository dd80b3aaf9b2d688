"""A message of a stored conversation, as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["said"]


def said(message: Mapping[str, Any]) -> str:
    """What a message in OpenAI's form says: its text, then each of its tool calls on a line, as `name(arguments)`."""
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [message.get("content"), *calls]))
