"""gpt-oss: channels. `analysis` is reasoning, `commentary to=functions.NAME` a call, `final` the answer.

A turn begins behind `<|start|>assistant` and ends with `<|return|>` or `<|call|>`; messages in it end with `<|end|>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparring.backend.gateway.formats.base import Call, Parsed, call_from, decode_json

__all__ = ["HarmonyFormat"]

_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=(?P<early>[^\s<]+))?<\|channel\|>(?P<channel>\w+)(?: to=(?P<late>[^\s<]+))?"
    r"\s*(?:<\|constrain\|>\w+\s*)?<\|message\|>(?P<text>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)
_FUNCTIONS = "functions."


class HarmonyFormat:
    """Commentary that calls nothing is content: a preamble that the user sees."""

    reads_special_tokens: ClassVar[bool] = True
    inner_ends: ClassVar[tuple[str, ...]] = ("<|end|>",)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[Call] = []
        position = 0
        try:
            while position < len(text):
                message = _MESSAGE.match(text, position)
                if message is None:
                    return Parsed(text)
                recipient = message["early"] or message["late"]
                if recipient is not None:
                    calls.append(_call(recipient, message["text"]))
                elif message["channel"] == "analysis":
                    reasoning.append(message["text"])
                else:
                    content.append(message["text"])
                position = message.end()
        except ValueError:
            return Parsed(text)
        return Parsed("".join(content), tuple(calls), "\n".join(reasoning) if reasoning else None)

    def partial(self, text: str) -> Parsed:
        return Parsed("")  # a later message may turn all of it into text that is intact


def _call(recipient: str, text: str) -> Call:
    if not recipient.startswith(_FUNCTIONS):
        raise ValueError("not a function")
    arguments, end = decode_json(text)
    if text[end:].strip():
        raise ValueError("more than the arguments")
    return call_from(recipient.removeprefix(_FUNCTIONS), arguments)
