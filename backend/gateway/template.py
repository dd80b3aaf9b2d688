"""Chat templates: where a model folder keeps its own, and the sandbox that renders them as transformers does.

transformers itself is not used: importing its tokenizers imports torch, and a gateway is a process without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sparring.errors import ConfigError, GatewayError
from sparring.types import Message

__all__ = ["ChatTemplate", "find_template", "is_shipped", "shipped_template", "template_message"]


def shipped_template(name: str) -> str:
    """Source of a tool template that comes with sparring.

    Raises:
        ConfigError: there is none of that name.
    """
    sources = _shipped()
    if name not in sources:
        raise ConfigError(f"model.tool_template: no shipped template {name!r}; there are {', '.join(sources)}")
    return sources[name]


def is_shipped(source: str) -> bool:
    """Whether it is one of sparring's own templates, as a model that sparring has trained brings it."""
    return source in _shipped().values()


def _shipped() -> dict[str, str]:
    folder = resources.files(__package__) / "templates"
    files = {entry.name.removesuffix(".jinja"): entry for entry in folder.iterdir() if entry.name.endswith(".jinja")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Source of the template that a model folder brings, in any of the places that Hugging Face knows, or None."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if template is None and (folder / "chat_template.json").is_file():
        template = json.loads((folder / "chat_template.json").read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):  # several named ones; "tool_use" is the one that knows tools
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use", named.get("default"))
    return template


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content a string, tool arguments an object where they are valid JSON."""
    rendered = message.to_openai()
    rendered["content"] = message.content or ""
    for call in rendered.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            pass
    return rendered


class ChatTemplate:
    """A compiled chat template.

    Raises:
        ConfigError: the source is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = dict(variables)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        """The conversation as text.

        Raises:
            GatewayError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[template_message(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise GatewayError(f"the chat template refuses these messages: {error}", param="messages") from error


class _GenerationTag(Extension):
    """`{% generation %}`, with which some templates mark what the model says: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> str:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; models are trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
