"""Tool calls in text: what parses, what is malformed, and that no text breaks the parser."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.envs.hermes import format_call, message_text, parse_text
from sparring.types import Message, ToolCall

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
keys = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.integers() | keys,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=5,
)


def test_a_text_without_a_call_is_an_answer():
    parsed = parse_text("  The answer is 5.\n")
    assert (parsed.answer, parsed.calls, parsed.problem) == ("The answer is 5.", (), None)


def test_calls_are_found_between_text_and_white_space():
    parsed = parse_text(f'First\n<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call>\nthen {CALL}')
    assert parsed.calls == (("add", '{"a": 1}'),) * 2
    assert parsed.answer == "First\n\nthen"


def test_a_closing_tag_inside_an_argument_does_not_end_the_call():
    arguments = {"text": "</tool_call> <tool_call>"}
    assert parse_text(format_call("say", arguments)).calls == (("say", json.dumps(arguments)),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "JSON does not parse"),
        ('<tool_call>{"name": "add", "arguments": {}}', "not followed by </tool_call>"),
        ('{"name": "add", "arguments": {}}</tool_call>', "without <tool_call> before it"),
        ("<tool_call></tool_call>", "JSON does not parse"),
        ("<tool_call>[1]</tool_call>", "a JSON object is wanted, this is a list"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name" must be the name of a tool'),
        ('<tool_call>{"name": "add"}</tool_call>', '"arguments" must be a JSON object'),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', '"arguments" must be a JSON object'),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "not JSON compliant"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "half a surrogate pair"),
        (f'<tool_call>{{"name": "add", "arguments": {"[" * 100_000}', "nested too deeply"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_how_a_call_looks(text, problem):
    parsed = parse_text(text)
    assert parsed.calls == ()
    assert problem in parsed.problem
    assert '<tool_call>{"name": "...", "arguments": {...}}</tool_call>' in parsed.problem


def test_one_malformed_call_spoils_the_others():
    parsed = parse_text(CALL + "<tool_call>{</tool_call>")
    assert parsed.calls == ()
    assert "Nothing was run" in parsed.problem


def test_calls_in_the_reasoning_are_thoughts():
    assert parse_text(f"<think>maybe {CALL}</think>5").answer == "5"
    assert parse_text(f"<think>maybe {CALL}").calls == ()


@given(name=st.text(min_size=1, max_size=8), arguments=st.dictionaries(keys, json_values, max_size=3))
def test_every_call_that_is_written_is_read_back(name, arguments):
    ((read_name, read_arguments),) = parse_text(format_call(name, arguments)).calls
    assert (read_name, json.loads(read_arguments)) == (name, arguments)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", "[", "<think>", "x", CALL])))
def test_no_text_raises(pieces):
    parsed = parse_text("".join(pieces))
    assert not (parsed.calls and parsed.problem)


def test_parsing_is_linear_in_hostile_text():
    def seconds(count):
        start = time.perf_counter()
        parse_text(CALL * count + "<tool_call>" * count)
        return time.perf_counter() - start

    seconds(1000)
    small, large = (min(seconds(count) for _ in range(3)) for count in (1000, 8000))
    assert large < small * 8 * 4  # quadratic would be 64


def test_a_message_with_calls_reads_as_a_model_would_have_written_it():
    message = Message("assistant", "Let me add.", tool_calls=(ToolCall("c", "add", '{"a": 1}'),))
    assert message_text(message) == f"Let me add.\n{CALL}"
