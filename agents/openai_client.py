"""The OpenAI Agents SDK's client of one session: what the SDK makes of a gateway's answers, put right."""

from __future__ import annotations

import logging
import sys
from typing import Any

import openai
from openai.types.responses import Response

from sparring.agents.remote import budget_error, served_at
from sparring.types import ChatClient

__all__ = ["session_client"]

_REQUEST_FAILED = "Error getting response"


def session_client(client: ChatClient) -> openai.AsyncOpenAI:
    """A client of OpenAI's for a session. Answers that met a limit come as answers.

    The SDK raises an incomplete response away before any hook has seen it. In an episode what it says was said, and is
    the environment's to judge; by chat completions the SDK keeps it too.
    """
    api = openai.AsyncOpenAI(base_url=served_at(client), api_key=client.api_key)
    create = api.responses.create

    async def create_whole(*arguments: Any, **fields: Any) -> Any:
        response = await create(*arguments, **fields)
        if isinstance(response, Response) and response.status == "incomplete":
            response.status = "completed"
        return response

    api.responses.create = create_whole  # type: ignore[method-assign]
    return api


def _is_news(record: logging.LogRecord) -> bool:
    """Whether what the SDK logs is more than that a request met a budget, which is how an episode may end."""
    error = sys.exc_info()[1]  # logged where it is handled
    return error is None or budget_error(error) is None or not record.getMessage().startswith(_REQUEST_FAILED)


logging.getLogger("openai.agents").addFilter(_is_news)
