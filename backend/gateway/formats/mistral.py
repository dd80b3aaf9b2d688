"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since v11 `[TOOL_CALLS]NAME[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.backend.gateway.formats.base import Call, Parsed, call_from, decode_json, held_back
from sparring.backend.gateway.formats.marked import MarkedFormat
from sparring.backend.gateway.formats.think import partial_reasoning, split_reasoning

__all__ = ["MistralFormat"]

_NAMED = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\]([^\s\[{]+))?\[ARGS\]")
_THINK, _THINK_END = "[THINK]", "[/THINK]"


class MistralFormat(MarkedFormat):
    reads_special_tokens = True
    opening, closing = "[TOOL_CALLS]", ""

    def read(self, text: str, position: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[Call], int]:
        if named := _NAMED.match(text, position):
            arguments, position = decode_json(text, named.end())
            return [call_from(named[1], arguments, id=named[2])], position
        listed, position = decode_json(text, position)
        if not isinstance(listed, list) or not listed or not all(isinstance(entry, dict) for entry in listed):
            raise ValueError("no list of calls")
        return [call_from(entry.get("name"), entry.get("arguments")) for entry in listed], position

    def split(self, text: str) -> tuple[str | None, str]:
        return split_reasoning(text, _THINK, _THINK_END)

    def partial(self, text: str) -> Parsed:
        reasoning, answer = partial_reasoning(text, _THINK, _THINK_END)
        return Parsed(held_back(answer, (self.opening,)), (), reasoning)
