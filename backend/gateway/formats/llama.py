"""Llama 3.1 to 3.3: a whole answer that is `{"name": ..., "parameters": {...}}`; Llama 3.2 and 4: `[f(a=1), g()]`."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparring.backend.gateway.formats.base import Call, Parsed, call_from, decode_json

__all__ = ["LlamaJsonFormat", "LlamaPythonicFormat"]

_TAG = "<|python_tag|>"


class LlamaJsonFormat:
    """Several calls are separated by semicolons. Text around a call makes it text."""

    reads_special_tokens: ClassVar[bool] = True
    inner_ends: ClassVar[tuple[str, ...]] = ()

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        calls: list[Call] = []
        rest = text.strip().removeprefix(_TAG).lstrip()
        try:
            while rest:
                value, end = decode_json(rest)
                if not isinstance(value, dict):
                    return Parsed(text)
                calls.append(call_from(value.get("name"), value.get("parameters", value.get("arguments"))))
                rest = rest[end:].lstrip()
                if rest and not rest.startswith(";"):
                    return Parsed(text)
                rest = rest[1:].lstrip()
        except ValueError:
            return Parsed(text)
        return Parsed("", tuple(calls)) if calls else Parsed(text)

    def partial(self, text: str) -> Parsed:
        start = text.lstrip()
        may_be_call = not start or start[0] == "{" or _TAG.startswith(start[: len(_TAG)])
        return Parsed("" if may_be_call else text)


class LlamaPythonicFormat:
    """A list of calls with literal keyword arguments; read as syntax, never run."""

    reads_special_tokens: ClassVar[bool] = False
    inner_ends: ClassVar[tuple[str, ...]] = ()

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes that a model got wrong
                tree = ast.parse(text.strip(), mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                return Parsed(text)
            return Parsed("", tuple(_call(node) for node in tree.elts))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return Parsed(text)

    def partial(self, text: str) -> Parsed:
        start = text.lstrip()
        return Parsed("" if not start or start[0] == "[" else text)


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call by keywords")
    name = ast.unparse(node.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("not the name of a function")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return call_from(name, arguments)
