"""An answer while it is being sampled: the content that a stream may already show."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.backend.gateway.chat_format import ChatFormat
from sparring.backend.gateway.formats.base import held_back

__all__ = ["Speech"]


class Speech:
    """Holds back what may yet become a tool call, reasoning, or a stop string."""

    def __init__(self, chat: ChatFormat, stop: Sequence[str]) -> None:
        self._chat, self._stop = chat, stop
        self._decoder = chat.incremental_decoder()
        self._text = ""
        self._shown = ""

    def hear(self, token_ids: Sequence[int]) -> str:
        """New content after these tokens, often none."""
        self._text += "".join(self._decoder(id_) for id_ in token_ids)
        sure = self._chat.parser.settled(self._text)
        if self._stop:
            sure = min(sure, held_back(self._text, self._stop))
        new = self._text[len(self._shown) : sure]
        self._shown += new
        return new

    def rest(self, content: str | None) -> str:
        """What is left to show of the finished message's content."""
        return (content or "")[len(self._shown) :]
