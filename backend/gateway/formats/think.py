"""`<think>...</think>` before the answer: reasoning that many families set apart. By itself, a format without tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparring.backend.gateway.formats.base import Parsed

__all__ = ["THINK", "ThinkFormat", "partial_reasoning", "split_reasoning"]

THINK, _END = "<think>", "</think>"


def split_reasoning(text: str, open_: str = THINK, close: str = _END) -> tuple[str | None, str]:
    """Reasoning and answer. A block that never closes is reasoning to its end, and the answer is empty."""
    start = text.lstrip()
    if not start.startswith(open_):
        return None, text
    thought, closed, answer = start.removeprefix(open_).partition(close)
    return thought.strip("\n"), answer.lstrip("\n") if closed else ""


def partial_reasoning(text: str, open_: str = THINK, close: str = _END) -> tuple[str | None, str]:
    """As `split_reasoning`, of an unfinished text: nothing while it may yet be reasoning."""
    start = text.lstrip()
    if open_.startswith(start[: len(open_)]) and close not in start:
        return None, ""
    return split_reasoning(text, open_, close)


class ThinkFormat:
    """Reasoning alone; every answer is text."""

    reads_special_tokens: ClassVar[bool] = False
    inner_ends: ClassVar[tuple[str, ...]] = ()

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        reasoning, answer = split_reasoning(text)
        return Parsed(answer, (), reasoning)

    def partial(self, text: str) -> Parsed:
        reasoning, answer = partial_reasoning(text)
        return Parsed(answer, (), reasoning)
