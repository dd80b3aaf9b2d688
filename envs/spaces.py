"""The text space of observations and actions."""

from __future__ import annotations

import string
from typing import Any

from gymnasium.spaces import Space

from sparring.types import Message

__all__ = ["ChatText"]

_ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"


class ChatText(Space[str]):
    """Any Unicode text of at most `max_length` characters; with `messages`, an assistant `Message` as well.

    It derives from `Space` and not from Gymnasium's `Text`, which wants a finite alphabet, and whose batches in shared
    memory silently come back wrong: with this class `AsyncVectorEnv(shared_memory=True)` refuses instead.
    """

    def __init__(self, max_length: int = 1_000_000, *, messages: bool = False, seed: int | None = None) -> None:
        self.max_length = max_length
        self.messages = messages
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short random text, for Gymnasium's checkers; masks do not apply."""
        length = int(self.np_random.integers(1, min(self.max_length, 40) + 1))
        return "".join(_ALPHABET[i] for i in self.np_random.integers(0, len(_ALPHABET), length))

    def contains(self, x: Any) -> bool:
        if isinstance(x, Message):
            return self.messages and x.role == "assistant" and len(x.content or "") <= self.max_length
        return isinstance(x, str) and len(x) <= self.max_length

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ChatText) and self.max_length == other.max_length and self.messages == other.messages
        )

    __hash__ = None  # type: ignore[assignment]  # mutable through its generator

    def __repr__(self) -> str:
        return f"ChatText({self.max_length}{', messages=True' if self.messages else ''})"
