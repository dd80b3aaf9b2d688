"""What most formats share: reasoning, then content in which calls stand between an opening and a closing mark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparring.backend.gateway.formats.base import Call, Parsed, held_back
from sparring.backend.gateway.formats.think import partial_reasoning, split_reasoning

__all__ = ["MarkedFormat"]


class MarkedFormat(ABC):
    """One malformed call spoils them all, as it does in `sparring.envs`: nothing runs of what is half understood.

    Attributes:
        opening, closing: the marks of a call, or of a section of calls. An empty closing: calls go to the end.
    """

    reads_special_tokens: ClassVar[bool] = False
    inner_ends: ClassVar[tuple[str, ...]] = ()
    opening: ClassVar[str]
    closing: ClassVar[str]

    @abstractmethod
    def read(self, text: str, position: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[Call], int]:
        """The calls behind an opening mark at `position`, and where the text goes on behind the closing one.

        Raises:
            ValueError: there is none that is well formed.
        """

    def split(self, text: str) -> tuple[str | None, str]:
        """Reasoning and answer."""
        return split_reasoning(text)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        reasoning, answer = self.split(text)
        content: list[str] = []
        calls: list[Call] = []
        position = 0
        try:
            while (start := answer.find(self.opening, position)) >= 0:
                content.append(answer[position:start])
                found, position = self.read(answer, start + len(self.opening), tools)
                calls += found
        except ValueError:
            return Parsed(answer, (), reasoning)
        content.append(answer[position:])
        if not calls or (self.closing and any(self.closing in part for part in content)):
            return Parsed(answer, (), reasoning)
        return Parsed("".join(content).rstrip(), tuple(calls), reasoning)

    def partial(self, text: str) -> Parsed:
        reasoning, answer = partial_reasoning(text)
        return Parsed(held_back(answer, (self.opening,)), (), reasoning)
