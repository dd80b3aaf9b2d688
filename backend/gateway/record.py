"""What a session leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparring.backend.gateway.tree import ConversationTree
from sparring.types import StopReason, TokenSequence, Usage

__all__ = ["SessionRecord"]


@dataclass(frozen=True)
class SessionRecord:
    """What a session leaves behind.

    Attributes:
        sequences: exactly as sampled, one for each leaf of the session's conversations.
        messages: the conversation of the latest turn, in OpenAI's format.
        breaks: why each sequence after the first had to start.
        normalised: client sampling settings that the run's replaced, by name.
        rewards: given to single turns, by interaction id.
        exhausted: the budget that a request was refused for, or None.
        tree: every turn, for exports of other styles.
    """

    session_id: str
    sequences: tuple[TokenSequence, ...]
    usage: Usage
    messages: tuple[Mapping[str, Any], ...]
    breaks: Counter[str]
    normalised: Counter[str]
    rewards: Mapping[str, float]
    exhausted: StopReason | None
    tree: ConversationTree = field(repr=False)
