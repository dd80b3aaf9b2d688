"""A message of a stored conversation, as text for people. Models, tools and agents wrote it: nothing of it reaches a
terminal raw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["printable", "said"]

# Control characters would move the cursor or retitle the window; bidirectional overrides reorder what is read.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters other than line feed and tab, overrides of its direction and lone surrogates as
    escapes.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def said(message: Mapping[str, Any]) -> str:
    """What a message in OpenAI's form says, printable: its text, then each tool call on a line, `name(arguments)`."""
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or ()]
    return printable("\n".join(filter(None, [message.get("content"), *calls])))
