"""What the adapters of agents that speak HTTP share."""

from __future__ import annotations

from sparring.errors import BudgetExhausted, ConfigError
from sparring.types import ChatClient, Message

__all__ = ["budget_error", "opening", "served_at"]

_BUDGETS = ("max_turns", "max_tokens")


def served_at(client: ChatClient) -> str:
    """The base_url of a session.

    Raises:
        ConfigError: the recorder is not served over HTTP.
    """
    if client.base_url is None:
        raise ConfigError("this agent speaks HTTP, and the recorder is not served: start a GatewayServer over it")
    return client.base_url


def budget_error(error: BaseException) -> BudgetExhausted | None:
    """The budget that a client's exception, or one that it was raised from, says has run out."""
    seen: BaseException | None = error
    while seen is not None:
        code = getattr(seen, "code", None)
        if code in _BUDGETS:
            return BudgetExhausted(str(seen), stop_reason=str(code))
        seen = seen.__cause__ or seen.__context__
    return None


def opening(messages: list[Message]) -> tuple[str | None, list[Message]]:
    """An environment's system prompt, and its other messages."""
    if messages and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return None, messages
