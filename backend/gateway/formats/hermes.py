"""Hermes 2 Pro, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, `<think>` before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.backend.gateway.formats.base import Call, call_from, decode_json
from sparring.backend.gateway.formats.marked import MarkedFormat

__all__ = ["HermesFormat"]


class HermesFormat(MarkedFormat):
    opening, closing = "<tool_call>", "</tool_call>"

    def read(self, text: str, position: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[Call], int]:
        # Decoded rather than matched, since an argument may hold the closing mark itself.
        value, position = decode_json(text, position)
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n"))
        if not isinstance(value, dict) or not text.startswith(self.closing, position):
            raise ValueError("no call")
        return [call_from(value.get("name"), value.get("arguments"))], position + len(self.closing)
