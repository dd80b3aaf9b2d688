"""Hermes 2 Pro, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, `<think>` before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.backend.gateway.formats.base import Call, Parsed, held_back, json_call
from sparring.backend.gateway.formats.think import THINK, split_reasoning

__all__ = ["HermesFormat"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


class HermesFormat:
    """Content may precede, follow or lie between the calls; text that looks like a call and is none stays content."""

    reads_special_tokens = False

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        reasoning, answer = split_reasoning(text)
        content: list[str] = []
        calls: list[Call] = []
        position = 0
        while (start := answer.find(_OPEN, position)) >= 0:
            found = _call_at(answer, start + len(_OPEN))
            if found is None:
                return Parsed(answer, (), reasoning)
            content.append(answer[position:start])
            call, position = found
            calls.append(call)
        content.append(answer[position:])
        if not calls:
            return Parsed(answer, (), reasoning)
        return Parsed("".join(content).strip(), tuple(calls), reasoning)

    def settled(self, text: str) -> int:
        return held_back(text, (_OPEN, THINK))


def _call_at(text: str, position: int) -> tuple[Call, int] | None:
    """The call whose JSON begins at `position`, and where the text goes on behind it."""
    # Decoded rather than matched, since an argument may hold the closing tag itself.
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        value, position = _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None
    while position < len(text) and text[position].isspace():
        position += 1
    if not text.startswith(_CLOSE, position) or not isinstance(value, dict):
        return None
    call = json_call(value.get("name"), value.get("arguments"))
    return None if call is None else (call, position + len(_CLOSE))
