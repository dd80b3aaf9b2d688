"""What a format of tool calls and reasoning does. One file a format; none ever raises on a model's text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Call", "Parsed", "ToolFormat", "held_back", "json_call"]


@dataclass(frozen=True)
class Call:
    """A tool call in a model's text. `arguments` is the JSON text of an object, `id` what the format itself gives."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Parsed:
    """A model's text, taken apart. With a malformed call in it, `content` is the text intact and `calls` is empty."""

    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None


class ToolFormat(Protocol):
    """How a family of models writes tool calls and reasoning.

    Attributes:
        reads_special_tokens: calls are marked by special tokens, so `parse` must see them.
    """

    reads_special_tokens: bool

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        """Take a finished text apart. Never raises. `tools` (JSON schemas) help formats that do not write types."""
        ...

    def settled(self, text: str) -> int:
        """How many leading characters of an unfinished text are content whatever comes next, for streaming."""
        ...


def json_call(name: object, arguments: object) -> Call | None:
    """A call from decoded JSON, or None where it is not one that every client could read back."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()  # a lone surrogate has no UTF-8
    except (ValueError, RecursionError):
        return None
    return Call(name, text)


def held_back(text: str, markers: Sequence[str]) -> int:
    """`settled` where calls and reasoning begin with a marker: the text before the first, or before its beginning."""
    end = min((at for at in (text.find(marker) for marker in markers) if at >= 0), default=len(text))
    if end == len(text):
        for marker in markers:
            overlap = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
            end = min(end, len(text) - overlap)
    return len(text[:end].rstrip())
