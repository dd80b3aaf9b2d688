"""Tools from plain async functions: hints and docstring give the schema, and arguments are checked against it."""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparring.errors import ConfigError
from sparring.spelling import did_you_mean

__all__ = ["Tool", "ToolBox", "ToolError", "ToolFunction"]

ToolFunction = Callable[..., Awaitable[Any]]


class ToolError(Exception):
    """The model used a tool wrongly. Its message becomes the tool's result, for the model to read."""


@dataclass(frozen=True)
class Tool:
    """One tool: `schema` as in the chat completions API, `run` with arguments as the model gave them.

    `run` raises `ToolError` on the model's mistakes and anything else on a fault of the environment.
    """

    name: str
    schema: dict[str, Any]
    run: Callable[[dict[str, Any]], Awaitable[Any]]

    @classmethod
    def from_function(cls, function: ToolFunction) -> Tool:
        """Derive a tool from an async function with type hints and a docstring (Google style, `Args:` optional).

        Raises:
            ConfigError: the function is not async, or lacks a hint or a docstring.
        """
        name, schema, validate = _describe(getattr(function, "__func__", function))

        async def run(arguments: dict[str, Any]) -> Any:
            return await function(**validate(arguments))

        return cls(name, schema, run)


class ToolBox:
    """The tools of one episode."""

    def __init__(self, tools: Iterable[ToolFunction | Tool] = ()) -> None:
        made = [tool if isinstance(tool, Tool) else Tool.from_function(tool) for tool in tools]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) != len(made):
            raise ConfigError(f"two tools share a name: {sorted(tool.name for tool in made)}")
        self.schemas = [tool.schema for tool in made]

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """Run a tool and return its result as text.

        Raises:
            ToolError: no such tool, or arguments that do not fit, with what would.
        """
        tool = self._tools.get(name)
        if tool is None:
            raise ToolError(_unknown_tool(name, self._tools))
        if isinstance(arguments, str):
            arguments = _parse_arguments(name, arguments)
        result = await tool.run(dict(arguments))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _unknown_tool(name: str, known: Iterable[str]) -> str:
    names = list(known)
    if not names:
        return f"there is no tool {_shorten(name)}: this task has no tools"
    return f"there is no tool {_shorten(name)}{did_you_mean(name, names) or '.'} Tools: {', '.join(names)}."


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _parse_arguments(name: str, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments of {name} are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments of {name} must be a JSON object, not {_shorten(arguments)}")
    return arguments


@functools.cache
def _describe(function: ToolFunction) -> tuple[str, dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Name, schema and argument check of a function. Cached: environments are made once an episode."""
    # Imported here because building models is what costs time in pydantic, and `import sparring.envs` is kept light.
    from pydantic import Field, TypeAdapter, ValidationError
    from typing_extensions import TypedDict  # pydantic refuses the one of typing before Python 3.12

    name = function.__name__
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"tool {name} must be an async function")
    description, argument_docs = _split_docstring(name, inspect.getdoc(function))
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    shown: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.name not in hints:
            raise ConfigError(f"parameter {parameter.name} of tool {name} has no type hint")
        hint = hints[parameter.name]
        optional = parameter.default is not inspect.Parameter.empty
        extra = {"default": parameter.default} if optional else None
        field = Field(description=argument_docs.get(parameter.name), json_schema_extra=extra)
        annotated: Any = typing.Annotated[hint, field]  # type: ignore[valid-type]
        fields[parameter.name] = typing.NotRequired[annotated] if optional else annotated
        shown.append(f"{parameter.name}: {getattr(hint, '__name__', hint)}")
    make_type: Any = TypedDict  # its fields are known at run time alone, which type checkers do not take
    arguments_type = make_type("Arguments", fields)
    arguments_type.__pydantic_config__ = {"extra": "forbid"}
    adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments_type)
    usage = f"{name}({', '.join(shown)})"

    def validate(arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return adapter.validate_python(arguments)
        except ValidationError as error:
            problems = "; ".join(_explain(problem, fields) for problem in error.errors(include_url=False)[:5])
            raise ToolError(f"{problems}. Usage: {usage}") from None

    parameters = _without_titles(adapter.json_schema())
    parameters.setdefault("properties", {})
    schema = {"name": name, "description": description, "parameters": parameters}
    return name, {"type": "function", "function": schema}, validate


def _split_docstring(name: str, docstring: str | None) -> tuple[str, dict[str, str]]:
    if not docstring:
        raise ConfigError(f"tool {name} has no docstring: it is the description that the model reads")
    description, _, rest = docstring.partition("\nArgs:\n")
    lines = re.split(r"\n\n|\n(?=\S)", rest)[0]
    documented = re.findall(r"^ {4}(\w+)[^:\n]*: (.+(?:\n {5,}.+)*)", lines, re.M)
    return description.strip(), {argument: re.sub(r"\s+", " ", text) for argument, text in documented}


def _explain(problem: Mapping[str, Any], known: Iterable[str]) -> str:
    where = ".".join(str(part) for part in problem["loc"])[:80]
    if problem["type"] == "missing":
        return f"argument {where!r} is missing"
    if problem["type"] == "extra_forbidden":
        return f"there is no argument {where!r}{did_you_mean(where, known)}"
    return f"argument {where!r}: {problem['msg']}, got {_shorten(problem['input'])}"


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """pydantic titles every schema; models need none of them. A property that is called title stays."""
    plain = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    for key in ("properties", "$defs"):
        if key in plain:
            plain[key] = {name: _without_titles(part) for name, part in plain[key].items()}
    if isinstance(plain.get("items"), dict):
        plain["items"] = _without_titles(plain["items"])
    return plain
