"""Tool calls in text, as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from sparring.types import Message

__all__ = ["ParsedText", "format_call", "message_text", "parse_text"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HINT = f'A call looks like {_OPEN}{{"name": "...", "arguments": {{...}}}}{_CLOSE}.'


@dataclass(frozen=True)
class ParsedText:
    """What an assistant wrote: calls as (name, arguments as JSON text), or what is wrong with one of them.

    One malformed call spoils the text: `calls` is then empty, so that nothing runs of what was only half understood.
    """

    answer: str
    calls: tuple[tuple[str, str], ...] = ()
    problem: str | None = None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_SURROGATE = re.compile("[\ud800-\udfff]")
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_text(text: str) -> ParsedText:
    """Find the tool calls of an assistant's text. Never raises, whatever the text; linear in its length."""
    visible = _after_thinking(text)
    if _OPEN not in visible and _CLOSE not in visible:
        return ParsedText(visible.strip())
    calls: list[tuple[str, str]] = []
    answer: list[str] = []
    position = 0
    try:
        while (start := visible.find(_OPEN, position)) >= 0:
            answer.append(_without_stray_close(visible[position:start]))
            call, position = _parse_call(visible, start + len(_OPEN))
            calls.append(call)
        answer.append(_without_stray_close(visible[position:]))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return ParsedText(visible.strip(), problem=f"Malformed tool call: {reason}. Nothing was run. {_HINT}")
    return ParsedText("".join(answer).strip(), tuple(calls))


def _after_thinking(text: str) -> str:
    """The text without the reasoning that it begins with; thinking that never ended leaves nothing.

    Block after block, so that a text from which the first was already taken reads the same.
    """
    while text.lstrip().startswith("<think>"):
        text = text.partition("</think>")[2]
    return text


def _without_stray_close(text: str) -> str:
    if _CLOSE in text:
        raise ValueError(f"{_CLOSE} without {_OPEN} before it")
    return text


def _parse_call(text: str, start: int) -> tuple[tuple[str, str], int]:
    """The call whose JSON begins at `start`, and the position behind its closing tag."""
    start = _skip_space(text, start)
    try:
        call, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON does not parse ({error.msg} at character {error.pos - start})") from None
    end = _skip_space(text, end)
    if not text.startswith(_CLOSE, end):
        raise ValueError(f"its JSON is not followed by {_CLOSE}")
    if not isinstance(call, dict):
        raise ValueError(f"a JSON object is wanted, this is a {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError('"name" must be the name of a tool')
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be a JSON object')
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 reads as infinity
    if _SURROGATE.search(name + written):
        raise ValueError("it holds half a surrogate pair, which is no character")
    return (name, written), end + len(_CLOSE)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def format_call(name: str, arguments: str | Mapping[str, Any]) -> str:
    """A call as a Hermes model writes it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{_OPEN}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}{_CLOSE}'


def message_text(message: Message) -> str:
    """A message as plain text, its tool calls written out."""
    calls = [format_call(call.name, call.arguments) for call in message.tool_calls]
    return "\n".join([*([message.content] if message.content else []), *calls])
