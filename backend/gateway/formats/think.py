"""`<think>...</think>` before the answer: reasoning that many families set apart."""

from __future__ import annotations

__all__ = ["THINK", "split_reasoning"]

THINK, _END = "<think>", "</think>"


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Reasoning and answer. A block that never closes is reasoning to its end, and the answer is empty."""
    start = text.lstrip()
    if not start.startswith(THINK):
        return None, text
    thought, closed, answer = start.removeprefix(THINK).partition(_END)
    return thought.strip("\n"), answer.lstrip("\n") if closed else ""
