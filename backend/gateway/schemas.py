"""JSON schemas: tools that a client declares, and answers that it wants to satisfy one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sparring.errors import GatewayError

__all__ = ["check_tools", "satisfies"]


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
        parameters = function.get("parameters")
        if parameters is None:
            continue
        where = f"tools[{index}].function.parameters"
        if not isinstance(parameters, Mapping):
            raise GatewayError(f"{where} of {function['name']} is not a JSON schema", param=where)
        if (problem := _schema_problem(json.dumps(parameters, sort_keys=True))) is not None:
            raise GatewayError(f"{where} of {function['name']} is not a JSON schema: {problem}", param=where)


def satisfies(text: str | None, schema: Mapping[str, Any]) -> bool:
    """Whether a text is JSON of that schema; `{}` stands for any JSON object."""
    from jsonschema import Draft202012Validator

    try:
        value = json.loads(text or "")
        return Draft202012Validator(dict(schema) or {"type": "object"}).is_valid(value)
    except (ValueError, RecursionError):
        return False


@lru_cache(maxsize=1024)
def _schema_problem(schema: str) -> str | None:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(json.loads(schema))
    except SchemaError as error:
        return error.message
    except RecursionError:
        return "it is nested too deeply"
    return None
