"""`<think>...</think>` at the start of a text: reasoning that many families set apart from the answer."""

from __future__ import annotations

__all__ = ["THINK", "split_reasoning"]

THINK, _END = "<think>", "</think>"


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Reasoning and answer. A block that never closes is reasoning to its end, and the answer is empty."""
    if not text.lstrip().startswith(THINK):
        return None, text
    reasoning, closed, answer = text.lstrip()[len(THINK) :].partition(_END)
    return reasoning.strip("\n"), answer.lstrip("\n") if closed else ""
