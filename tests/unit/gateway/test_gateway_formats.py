"""Tool-call formats: what is a call, what is text, and that nothing a model says raises."""

import pytest

from sparring.backend.gateway.formats import get_format

HERMES = get_format("hermes")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', "", [("f", '{"a": "é"}')]),
        ('So:\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "So:", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            "",
            [("f", '{"x": "</tool_call>"}')],
        ),
    ],
)
def test_hermes_finds_calls(text, content, calls):
    parsed = HERMES.parse(text)
    assert parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.calls] == calls


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "",
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call></tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": </tool_call>',
    ],
)
def test_hermes_leaves_what_is_malformed_as_it_is(text):
    parsed = HERMES.parse(text)
    assert (parsed.content, parsed.calls, parsed.reasoning) == (text, (), None)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("<think>Hm.", "Hm.", ""),
        ("Yes.</think>", None, "Yes.</think>"),
    ],
)
def test_thinking_is_set_apart(text, reasoning, content):
    parsed = HERMES.parse(text)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "sure"),
    [
        ("So it is", "So it is"),
        ("So <tool", "So"),
        ("So < 3", "So < 3"),
        ("So\n<tool_call>{", "So"),
        ("So  ", "So"),
        ("<thi", ""),
    ],
)
def test_what_may_become_a_call_is_held_back_from_a_stream(text, sure):
    assert text[: HERMES.settled(text)] == sure
