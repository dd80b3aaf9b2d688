"""Tool-call formats: what is written is read, what is malformed stays text, and nothing a model says raises."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.backend.gateway.formats import format_names, get_format

HERMES = get_format("hermes")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "n": {"type": "number"}, "o": {"type": "object"}},
            },
        },
    }
]

# How each family writes calls; the arguments are a dict, and names and texts hold none of the marks.


def hermes(calls):
    written = (json.dumps({"name": n, "arguments": a}) for n, a in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def qwen3_coder(calls):
    def parameter(key, value):
        return f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={n}>\n{''.join(parameter(k, v) for k, v in a.items())}</function>\n</tool_call>"
        for n, a in calls
    )


def glm(calls):
    def pair(key, value):
        written = value if isinstance(value, str) else json.dumps(value)
        return f"<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n"

    return "\n".join(f"<tool_call>{n}\n{''.join(pair(k, v) for k, v in a.items())}</tool_call>" for n, a in calls)


def kimi(calls):
    written = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def deepseek(calls):
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    written = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def mistral(calls):
    return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls])


def mistral_v11(calls):
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)


def llama_json(calls):
    return "<|python_tag|>" + "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def llama_pythonic(calls):
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>" for n, a in calls
    )


WRITERS = [
    ("hermes", hermes),
    ("qwen3-coder", qwen3_coder),
    ("glm", glm),
    ("kimi", kimi),
    ("deepseek", deepseek),
    ("deepseek", deepseek_v31),
    ("mistral", mistral),
    ("mistral", mistral_v11),
    ("llama3-json", llama_json),
    ("llama3-pythonic", llama_pythonic),
    ("harmony", harmony),
]
CONTENT_FIRST = {"hermes", "qwen3-coder", "glm", "kimi", "deepseek", "mistral"}

LETTERS = st.characters(codec="utf-8", exclude_characters="<>[]|｜", exclude_categories=["Cc", "Zl", "Zp"])
PLAIN = st.text(LETTERS, max_size=12)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": PLAIN,
        "n": st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False),
        "o": st.dictionaries(PLAIN, st.booleans() | PLAIN, max_size=2),
    },
)
CALLS = st.lists(st.tuples(st.just("f"), ARGUMENTS), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[write.__name__ for _, write in WRITERS])
def test_what_is_written_is_read(name, write):
    tool_format = get_format(name)

    @settings(max_examples=150, deadline=None)
    @given(calls=CALLS, content=PLAIN)
    def law(calls, content):
        before = content.strip() if name in CONTENT_FIRST else ""
        parsed = tool_format.parse(before + write(calls), TOOLS)
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
        assert parsed.content == before

    law()


MARKS = [
    '<tool_call>', '</tool_call>', '{"name": "f", "arguments": {"s": "x"}}', '{"name": "f", "parameters": {}}',
    '{"s": 1e999}', '{"s": NaN}', '"\\ud800"', "<think>", "</think>", "<thi", "[THINK]", "[/THINK]", "<function=f>",
    "</function>", "<parameter=s>\n", "</parameter>", "f\n", "<arg_key>s</arg_key>", "<arg_value>", "</arg_value>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function",
    "<｜tool▁sep｜>", "\n```json\n", "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<|python_tag|>", "[f(s='x')]", "[f(**x)]", "[f(s=open('x'))]", "[" * 300, "(" * 300,
    "<|channel|>analysis", "<|channel|>final", "<|channel|>commentary to=functions.f ", "<|constrain|>json",
    "<|message|>", "<|end|>",
    "<|call|>", "<|start|>assistant", ";", "{", "}", "[", "]", "\n", " ", "So it is.", "é世", "\x00", "\\",
]  # fmt: skip
NOISE = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("name", format_names())
def test_nothing_that_a_model_says_raises(name):
    """1,100 texts for each of ten formats, whole, truncated and in pieces."""
    tool_format = get_format(name)

    @settings(max_examples=1100, deadline=None)
    @given(
        text=NOISE | NOISE.map("<think>".__add__) | CALLS.flatmap(lambda calls: _damaged(name, calls)),
        cuts=st.lists(st.floats(0, 1), max_size=4),
    )
    def law(text, cuts):
        parsed = tool_format.parse(text, TOOLS)
        for call in parsed.calls:
            assert isinstance(json.loads(call.arguments), dict)
            (call.name + call.arguments).encode()
        if not parsed.calls and parsed.reasoning is None and name != "harmony":
            assert parsed.content == text
        shown = ""
        for cut in sorted([*cuts, 1.0]):
            sure = tool_format.partial(text[: round(cut * len(text))])
            assert sure.content.startswith(shown)
            assert parsed.content.startswith(sure.content)
            assert sure.reasoning in (None, parsed.reasoning)
            shown = sure.content

    law()


def _damaged(name, calls):
    """A well-formed text, cut somewhere, or with a piece taken out or put in."""
    text = next((write for known, write in WRITERS if known == name), hermes)(calls)
    places = st.integers(0, len(text))
    return st.tuples(places, places, st.sampled_from(["", *MARKS])).map(
        lambda at: text[: min(at[:2])] + at[2] + text[max(at[:2]) :]
    )


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', "", [("f", '{"a": "é"}')]),
        ('So:\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "So:", [("f", "{}")]),
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
    for name in ("hermes", "think", "deepseek", "glm"):
        parsed = get_format(name).parse(text)
        assert (parsed.reasoning, parsed.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "sure"),
    [
        ("So it is", None, "So it is"),
        ("So <tool", None, "So"),
        ("So < 3", None, "So < 3"),
        ("So\n<tool_call>{", None, "So"),
        ("So  ", None, "So"),
        ("<thi", None, ""),
        ("<think>Hm.", None, ""),
        ("<think>Hm.</think>\n\nYes", "Hm.", "Yes"),
    ],
)
def test_what_may_become_a_call_is_held_back_from_a_stream(text, reasoning, sure):
    parsed = HERMES.partial(text)
    assert (parsed.reasoning, parsed.content) == (reasoning, sure)


def test_harmony_has_channels():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "x"}'
    )
    parsed = get_format("harmony").parse(text)
    assert (parsed.reasoning, parsed.content) == ("Hm.", "I look.")
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", '{"s": "x"}')]


def test_kimi_s_ids_are_the_model_s():
    assert [call.id for call in get_format("kimi").parse(kimi([("f", {}), ("f", {})])).calls] == [
        "functions.f:0",
        "functions.f:1",
    ]


def test_a_schema_tells_a_string_from_json():
    for name, write in (("qwen3-coder", qwen3_coder), ("glm", glm)):
        [call] = get_format(name).parse(write([("f", {"s": "5", "n": 5})]), TOOLS).calls
        assert json.loads(call.arguments) == {"s": "5", "n": 5}


def test_a_pythonic_call_is_never_run():
    parsed = get_format("llama3-pythonic").parse("[f(s=__import__('os').getcwd())]")
    assert parsed.calls == ()
