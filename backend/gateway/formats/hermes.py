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
    """Content may stand around the calls. One malformed call spoils them all, as it does in `sparring.envs`."""

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
        if not calls or any(_CLOSE in part for part in content):
            return Parsed(answer, (), reasoning)
        return Parsed("".join(content).strip(), tuple(calls), reasoning)

    def settled(self, text: str) -> int:
        return held_back(text, (_OPEN, THINK))


def _call_at(text: str, position: int) -> tuple[Call, int] | None:
    """The call whose JSON begins at `position`, and where the text goes on behind it."""
    # Decoded rather than matched, since an argument may hold the closing tag itself.
    position = _skip_space(text, position)
    try:
        value, position = _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None
    position = _skip_space(text, position)
    if not text.startswith(_CLOSE, position) or not isinstance(value, dict):
        return None
    call = json_call(value.get("name"), value.get("arguments"))
    return None if call is None else (call, position + len(_CLOSE))


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
