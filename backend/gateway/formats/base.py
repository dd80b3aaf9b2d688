"""What a format of tool calls and reasoning does. One file a format; none ever raises on a model's text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol

__all__ = ["Call", "Parsed", "ToolFormat", "call_from", "decode_json", "held_back", "typed_value"]


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
        inner_ends: special tokens that end a part of an answer and not the answer.
    """

    reads_special_tokens: ClassVar[bool]
    inner_ends: ClassVar[tuple[str, ...]]

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        """Take a finished text apart. Never raises. `tools` (JSON schemas) help formats that do not write types."""
        ...

    def partial(self, text: str) -> Parsed:
        """What of an unfinished text is sure, for streaming: complete reasoning, and the beginning of the content.

        Whatever comes next, `parse` will give this reasoning, and a content that begins with this one.
        """
        ...


def decode_json(text: str, position: int = 0) -> tuple[Any, int]:
    """The JSON value at a position behind white space, and where it ends.

    Raises:
        ValueError: there is none, or it is nested too deeply, or holds what is no JSON number.
    """
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    try:
        return _DECODER.raw_decode(text, position)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def call_from(name: object, arguments: object, id: str | None = None) -> Call:
    """A call from decoded values.

    Raises:
        ValueError: it is none that every client could read back.
    """
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and an object of arguments")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    (name + text).encode()  # a lone surrogate has no UTF-8, and raises a ValueError
    return Call(name, text, id)


def typed_value(text: str, name: str, parameter: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """A value that a format writes without its type: text where the schema wants a string, else JSON if it is that."""
    schema: Mapping[str, Any] = {}
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            found = properties.get(parameter) if isinstance(properties, Mapping) else None
            schema = found if isinstance(found, Mapping) else {}
    if schema.get("type") == "string":
        return text
    try:
        value, end = decode_json(text)
    except ValueError:
        return text
    return value if not text[end:].strip() else text


def held_back(text: str, markers: Sequence[str]) -> str:
    """The text before the first marker or its beginning, without the white space that a parse would take away."""
    end = min((at for at in (text.find(marker) for marker in markers) if at >= 0), default=len(text))
    if end == len(text):
        for marker in markers:
            overlap = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
            end = min(end, len(text) - overlap)
    return text[:end].rstrip()
