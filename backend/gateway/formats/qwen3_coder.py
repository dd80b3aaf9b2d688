"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.backend.gateway.formats.base import Call, call_from, typed_value
from sparring.backend.gateway.formats.marked import MarkedFormat

__all__ = ["Qwen3CoderFormat"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
_PARAMETER_END, _FUNCTION_END = "</parameter>", re.compile(r"\s*</function>\s*</tool_call>")


class Qwen3CoderFormat(MarkedFormat):
    """Values have no type in the text: the tool's schema tells a string from JSON."""

    opening, closing = "<tool_call>", "</tool_call>"

    def read(self, text: str, position: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[Call], int]:
        head = _FUNCTION.match(text, position)
        if head is None:
            raise ValueError("no function")
        name, position = head[1].strip(), head.end()
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, position):
            end = text.find(_PARAMETER_END, parameter.end())
            if end < 0:
                raise ValueError("a parameter does not end")
            value = text[parameter.end() : end].removesuffix("\n")
            arguments[parameter[1].strip()] = typed_value(value, name, parameter[1].strip(), tools)
            position = end + len(_PARAMETER_END)
            position += len(text[position:]) - len(text[position:].lstrip())
        tail = _FUNCTION_END.match(text, position)
        if tail is None:
            raise ValueError("the function does not end")
        return [call_from(name, arguments)], tail.end()
