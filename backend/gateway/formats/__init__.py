"""Formats of tool calls and reasoning, by name."""

from __future__ import annotations

from collections.abc import Callable

from sparring.backend.gateway.formats.base import Call, Parsed, ToolFormat
from sparring.backend.gateway.formats.deepseek import DeepSeekFormat
from sparring.backend.gateway.formats.glm import GlmFormat
from sparring.backend.gateway.formats.harmony import HarmonyFormat
from sparring.backend.gateway.formats.hermes import HermesFormat
from sparring.backend.gateway.formats.kimi import KimiFormat
from sparring.backend.gateway.formats.llama import LlamaJsonFormat, LlamaPythonicFormat
from sparring.backend.gateway.formats.mistral import MistralFormat
from sparring.backend.gateway.formats.qwen3_coder import Qwen3CoderFormat
from sparring.backend.gateway.formats.think import ThinkFormat
from sparring.errors import ConfigError

__all__ = ["Call", "Parsed", "ToolFormat", "format_names", "get_format"]

_FORMATS: dict[str, Callable[[], ToolFormat]] = {
    "deepseek": DeepSeekFormat,
    "glm": GlmFormat,
    "harmony": HarmonyFormat,
    "hermes": HermesFormat,
    "kimi": KimiFormat,
    "llama3-json": LlamaJsonFormat,
    "llama3-pythonic": LlamaPythonicFormat,
    "mistral": MistralFormat,
    "qwen3-coder": Qwen3CoderFormat,
    "think": ThinkFormat,
}


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
