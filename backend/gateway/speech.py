"""An answer while it is being sampled: what a stream may already show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparring.backend.gateway.chat_format import ChatFormat
from sparring.backend.gateway.formats.base import held_back
from sparring.backend.gateway.request import TextDelta
from sparring.types import Message

__all__ = ["Speech"]


class Speech:
    """Holds back what may yet become a tool call, reasoning, or a stop string."""

    def __init__(self, chat: ChatFormat, stop: Sequence[str]) -> None:
        self._chat, self._stop = chat, stop
        self._decoder = chat.incremental_decoder()
        self._text = ""
        self._shown = ""
        self._reasoned = False

    def hear(self, token_ids: Sequence[int]) -> Iterator[TextDelta]:
        """What these tokens make sure, often nothing."""
        new = "".join(self._decoder(id_) for id_ in token_ids)
        if not new:
            return
        self._text += new
        text = held_back(self._text, self._stop) if self._stop else self._text
        sure = self._chat.parser.partial(text)
        yield from self._show(sure.reasoning, sure.content)

    def rest(self, message: Message) -> Iterator[TextDelta]:
        """What is left to show of the finished message."""
        yield from self._show(message.reasoning, message.content or "")

    def _show(self, reasoning: str | None, content: str) -> Iterator[TextDelta]:
        if reasoning and not self._reasoned:
            self._reasoned = True
            yield TextDelta(reasoning, reasoning=True)
        if len(content) > len(self._shown):
            yield TextDelta(content[len(self._shown) :])
            self._shown = content
