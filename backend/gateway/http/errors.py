"""Errors as OpenAI's and Anthropic's clients understand them."""

from __future__ import annotations

from typing import Any

from sparring.errors import ConfigError, EngineError, GatewayError, SparringError

__all__ = ["anthropic_error", "openai_error"]

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {**_OPENAI_TYPES, 413: "request_too_large"}


def openai_error(error: SparringError) -> tuple[int, dict[str, Any]]:
    """Status and body. A budget that ran out is a 400, which SDKs raise at once and do not retry."""
    status = _status(error)
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = getattr(error, "code", None) or error.kind
    detail = {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": code}
    return status, {"error": detail, "detail": str(error)}


def anthropic_error(error: SparringError) -> tuple[int, dict[str, Any]]:
    status = _status(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": str(error)}}


def _status(error: SparringError) -> int:
    if isinstance(error, GatewayError):
        return error.status
    if isinstance(error, EngineError):
        return 503
    return 400 if isinstance(error, ConfigError) else 500
