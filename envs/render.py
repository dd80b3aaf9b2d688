"""A conversation for people to read. Models and tools wrote it, so nothing of it reaches a terminal or page raw."""

from __future__ import annotations

import html
from collections.abc import Iterable

from sparring.envs.hermes import message_text
from sparring.transcript import printable
from sparring.types import Message

__all__ = ["render_ansi", "render_html"]

_COLOURS = {"system": 90, "user": 36, "assistant": 32, "tool": 33}


def render_ansi(messages: Iterable[Message]) -> str:
    """Text with coloured role names; control characters of the conversation are shown as escapes."""
    blocks = (f"\x1b[{_COLOURS[m.role]}m{m.role}\x1b[0m\n{printable(_full_text(m))}" for m in messages)
    return "\n\n".join(blocks)


def render_html(messages: Iterable[Message]) -> str:
    """A `<div>` without scripts or styles of its own; every text in it is escaped."""
    blocks = (
        f'<section class="{m.role}"><h4>{m.role}</h4><pre>{html.escape(printable(_full_text(m)))}</pre></section>'
        for m in messages
    )
    return f'<div class="sparring-chat">{"".join(blocks)}</div>'


def _full_text(message: Message) -> str:
    text = message_text(message)
    return f"<think>{message.reasoning}</think>\n{text}" if message.reasoning else text
