"""Kimi K2: a section of `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.backend.gateway.formats.base import Call, call_from, decode_json
from sparring.backend.gateway.formats.marked import MarkedFormat

__all__ = ["KimiFormat"]

_HEAD = re.compile(r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>")
_TAIL = re.compile(r"\s*<\|tool_call_end\|>")
_END = re.compile(r"\s*<\|tool_calls_section_end\|>")


class KimiFormat(MarkedFormat):
    """The model itself numbers its calls over the whole conversation; that is their id."""

    reads_special_tokens = True
    opening, closing = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

    def read(self, text: str, position: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[Call], int]:
        calls: list[Call] = []
        while head := _HEAD.match(text, position):
            arguments, position = decode_json(text, head.end())
            tail = _TAIL.match(text, position)
            if tail is None:
                raise ValueError("a call does not end")
            calls.append(call_from(head[2], arguments, id=head[1]))
            position = tail.end()
        end = _END.match(text, position)
        if end is None or not calls:
            raise ValueError("the section does not end")
        return calls, end.end()
