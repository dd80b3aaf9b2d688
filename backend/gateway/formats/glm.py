"""GLM-4.5 and later: `<tool_call>NAME\\n<arg_key>K</arg_key>\\n<arg_value>V</arg_value>\\n</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.backend.gateway.formats.base import Call, call_from, typed_value
from sparring.backend.gateway.formats.marked import MarkedFormat

__all__ = ["GlmFormat"]

_NAME = re.compile(r"\s*([^<\s]+)\s*")
_PAIR = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


class GlmFormat(MarkedFormat):
    """Strings are written bare, everything else as JSON: the tool's schema tells one from the other."""

    opening, closing = "<tool_call>", "</tool_call>"

    def read(self, text: str, position: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[Call], int]:
        head = _NAME.match(text, position)
        if head is None:
            raise ValueError("no name")
        name, position = head[1], head.end()
        arguments: dict[str, Any] = {}
        while pair := _PAIR.match(text, position):
            key = pair[1].strip()
            arguments[key] = typed_value(pair[2], name, key, tools)
            position = pair.end()
        if not text.startswith(self.closing, position):
            raise ValueError("the call does not end")
        return [call_from(name, arguments)], position + len(self.closing)
