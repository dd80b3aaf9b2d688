"""Who asks whom: the same for every protocol."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import unquote

from fastapi import Request

from sparring.backend.gateway.request import ChatRequest
from sparring.backend.gateway.session import Session
from sparring.types import AGENT_HEADER

__all__ = ["addressed"]


def addressed(asked: ChatRequest, request: Request, session: Session, model: str) -> ChatRequest:
    """The request with the agent that its header names, the policy that `model` means, and a name for the turn.

    Raises:
        GatewayError: 404, there is no such model.
    """
    return replace(
        asked,
        agent_id=unquote(request.headers.get(AGENT_HEADER, asked.agent_id)),
        policy_id=session.policy_for(model),
        interaction_id=session.new_interaction_id(),
    )
