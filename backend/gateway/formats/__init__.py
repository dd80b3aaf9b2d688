"""Formats of tool calls and reasoning, by name."""

from __future__ import annotations

from collections.abc import Callable

from sparring.backend.gateway.formats.base import Call, Parsed, ToolFormat
from sparring.backend.gateway.formats.hermes import HermesFormat
from sparring.errors import ConfigError

__all__ = ["Call", "Parsed", "ToolFormat", "format_names", "get_format"]

_FORMATS: dict[str, Callable[[], ToolFormat]] = {"hermes": HermesFormat}


def format_names() -> tuple[str, ...]:
    return tuple(sorted(_FORMATS))


def get_format(name: str) -> ToolFormat:
    """The format of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _FORMATS:
        raise ConfigError(f"model.tool_format: no format {name!r}; there are {', '.join(format_names())}")
    return _FORMATS[name]()
