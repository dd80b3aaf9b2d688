"""JSON schemas: tools that a client declares, and answers that it wants to satisfy one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sparring.errors import GatewayError

__all__ = ["check_schema", "check_tools", "satisfies"]

_CACHED_CHARACTERS = 2**16  # agents send the same tools with each request; what is longer is checked each time


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tools that are not functions with a name and a JSON schema.

    Raises:
        GatewayError: which tool, and why.
    """
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise GatewayError(f"tools[{index}] is not a function tool", param=f"tools[{index}]")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise GatewayError(f"tools[{index}].function has no name", param=f"tools[{index}].function.name")
        if function.get("parameters") is not None:
            check_schema(function["parameters"], f"tools[{index}].function.parameters", f" of {function['name']}")


def check_schema(schema: Any, where: str, whose: str = "") -> dict[str, Any]:
    """The schema, which an answer can be held to.

    Raises:
        GatewayError: it is not a JSON schema; `where` is the request's field.
    """
    problem = None
    if isinstance(schema, dict):
        text = json.dumps(schema, sort_keys=True)
        problem = (_problem if len(text) <= _CACHED_CHARACTERS else _problem.__wrapped__)(text)
    if problem is not None or not isinstance(schema, dict):
        raise GatewayError(f"{where}{whose} is not a JSON schema: {problem or 'it is no object'}", param=where)
    return schema


def satisfies(text: str | None, schema: Mapping[str, Any]) -> bool:
    """Whether a text is JSON of that schema; `{}` stands for any JSON object.

    Raises:
        GatewayError: the schema refers to what is not in it: nothing is fetched.
    """
    from jsonschema import Draft202012Validator
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(text or "")
        validator = Draft202012Validator(dict(schema) or {"type": "object"}, registry=Registry())
        return validator.is_valid(value)
    except (ValueError, RecursionError, ArithmeticError):  # of numbers that no float holds
        return False
    except Unresolvable as error:
        raise GatewayError(f"response_format refers to what is not in it: {error}", param="response_format") from error


@lru_cache(maxsize=256)
def _problem(schema: str) -> str | None:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(json.loads(schema))
    except SchemaError as error:
        return error.message
    except RecursionError:
        return "it is nested too deeply"
    return None
