"""Tools from typed functions: the schema, the check of arguments, and errors that a model can act on."""

from typing import Literal

import pytest

from sparring.envs import Tool, ToolBox, ToolError
from sparring.errors import ConfigError


async def search(
    query: str, limit: int = 3, order: Literal["new", "old"] = "new", tags: list[str] | None = None
) -> dict:
    """Search the notes.

    Finds whole words.

    Args:
        query: what to look for,
            in plain words
        limit: how many at most

    Returns: a dictionary.
    """
    return {"query": query, "limit": limit, "order": order, "tags": tags}


BOX = ToolBox([search])


def test_the_schema_comes_from_hints_and_docstring():
    (schema,) = BOX.schemas
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("search", "Search the notes.\n\nFinds whole words.")
    parameters = function["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["query"] == {"type": "string", "description": "what to look for, in plain words"}
    assert parameters["properties"]["limit"] == {
        "type": "integer",
        "description": "how many at most",
        "default": 3,
    }
    assert parameters["properties"]["order"]["enum"] == ["new", "old"]


async def test_results_that_are_no_text_become_json():
    assert await BOX.call("search", '{"query": "é"}') == '{"query": "é", "limit": 3, "order": "new", "tags": null}'


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("serch", {}, "there is no tool 'serch'; did you mean search? Tools: search."),
        ("search", {}, "argument 'query' is missing. Usage: search(query: str"),
        ("search", {"query": "a", "limits": 1}, "there is no argument 'limits'; did you mean limit?"),
        ("search", {"query": 3}, "argument 'query': Input should be a valid string, got 3"),
        ("search", {"query": "a", "order": "up"}, "argument 'order': Input should be 'new' or 'old', got 'up'"),
        ("search", "{", "not valid JSON"),
        ("search", "[1]", "must be a JSON object, not [1]"),
        ("search", "[" * 100_000, "not valid JSON"),
    ],
)
async def test_a_wrong_call_says_what_would_be_right(name, arguments, problem):
    with pytest.raises(ToolError) as caught:
        await BOX.call(name, arguments)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 1000


async def test_a_hostile_value_is_not_echoed_in_full():
    with pytest.raises(ToolError) as caught:
        await BOX.call("search", {"query": ["x" * 10_000] * 10, **{f"k{i}": 1 for i in range(1000)}})
    assert len(str(caught.value)) < 1000


async def test_a_task_without_tools_says_so():
    with pytest.raises(ToolError, match="this task has no tools"):
        await ToolBox().call("search", {})


async def test_a_number_written_as_text_is_taken_for_a_number():
    assert '"limit": 5' in await BOX.call("search", {"query": "a", "limit": "5"})


def test_a_tool_must_be_async_and_typed_and_documented():
    def plain(x: int) -> int:
        """Plain."""
        return x

    async def untyped(x) -> int:
        """Untyped."""
        return x

    async def undocumented(x: int) -> int:
        return x

    for function, problem in ((plain, "async"), (untyped, "no type hint"), (undocumented, "no docstring")):
        with pytest.raises(ConfigError, match=problem):
            Tool.from_function(function)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="share a name"):
        ToolBox([search, search])


async def test_parameters_may_have_names_that_pydantic_models_use():
    async def odd(schema: str, copy: int = 1, title: str = "t") -> str:
        """Odd names."""
        return f"{schema} {copy} {title}"

    box = ToolBox([odd])
    assert set(box.schemas[0]["function"]["parameters"]["properties"]) == {"schema", "copy", "title"}
    assert await box.call("odd", {"schema": "s", "copy": 2}) == "s 2 t"
