"""A model that answers in sessions: the trained policy, or a frozen one beside it."""

from __future__ import annotations

from dataclasses import dataclass

from sparring.backend.engines.base import Engine, SamplingParams
from sparring.backend.gateway.chat_format import ChatFormat

__all__ = ["POLICY", "ServedModel"]

POLICY = "policy"  # the trained one's id


@dataclass(frozen=True)
class ServedModel:
    """
    Attributes:
        sampling: how it samples unless a client may say otherwise: in an evaluation, or where it is not trained.
        max_length: context length in tokens, prompt and completion together.
        trained: its tokens are actions. A frozen model's are context, and cost the episode no budget.
    """

    policy_id: str
    engine: Engine
    chat: ChatFormat
    sampling: SamplingParams
    max_length: int
    trained: bool = True
