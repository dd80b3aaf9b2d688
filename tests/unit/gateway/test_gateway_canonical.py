"""A client may hand an answer back in any spelling that SDKs produce: the sampled tokens stand."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import Recorder
from sparring.types import Message

ANSWERS = st.sampled_from(
    [
        "Plain.",
        " padded \n",
        "<think>\nHm.\n</think>\n\nYes.",
        '<tool_call>{"name": "f", "arguments": {"b": 1.0, "a": [2, {"x": "é"}]}}</tool_call>',
        'Look:\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<think>\nHm.\n</think>\n\nBoth:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
        '<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>',
        "<tool_call>{",
    ]
)


def null_for_empty(said):
    return [replace(said, content=said.content or None)]


def empty_for_null(said):
    return [replace(said, content=said.content or "")]


def stripped(said):
    return [replace(said, content=(said.content or "").strip())]


def without_reasoning(said):
    return [replace(said, reasoning=None)]


def respelled_arguments(said):
    def respell(text):
        value = json.loads(text, parse_float=lambda number: int(float(number)))
        return json.dumps(dict(reversed(value.items())), indent=3)

    return [replace(said, tool_calls=tuple(replace(c, arguments=respell(c.arguments)) for c in said.tool_calls))]


def renamed_ids(said):
    return [replace(said, tool_calls=tuple(replace(c, id=f"call_{c.id}") for c in said.tool_calls))]


def without_content(said):
    return [replace(said, content=None)] if said.tool_calls else [said]


def one_message_a_call(said):
    return [replace(said, content="", tool_calls=(call,)) for call in said.tool_calls] or [said]


SPELLINGS = [
    null_for_empty,
    empty_for_null,
    stripped,
    without_reasoning,
    respelled_arguments,
    renamed_ids,
    without_content,
    one_message_a_call,
]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(ANSWERS, st.sampled_from(SPELLINGS)), min_size=1, max_size=8))
def test_every_spelling_is_the_same_conversation(chat, turns):
    record = asyncio.run(_play(chat, turns))
    assert record.breaks == {}
    assert len(record.sequences) == 1
    assert len(record.sequences[0].turns) == len(turns) + 1


async def _play(chat, turns):
    texts = iter([*(text for text, _ in turns), "End."])
    engine = ScriptedEngine(lambda _: chat._tokenizer.encode(next(texts) + "<|im_end|>", add_special_tokens=False).ids)
    await engine.start()
    recorder = Recorder(engine, chat, SamplingParams(max_new_tokens=500), max_length=100_000)
    session = recorder.open_session("s", turn_budget=100, token_budget=100_000)
    messages = [Message("user", "hi")]
    for _, spell in turns:
        said = (await session.chat(messages)).message
        for part in spell(said):
            messages += [part, *(Message("tool", call.name, tool_call_id=call.id) for call in part.tool_calls)]
        messages.append(Message("user", "Go on."))
    await session.chat(messages)
    await recorder.aclose()
    return session.record()


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda said: replace(said, tool_calls=(replace(said.tool_calls[0], arguments='{"a": 9}'),)),
        lambda said: replace(said, tool_calls=(replace(said.tool_calls[0], name="g"),)),
        lambda said: replace(said, content="Something else."),
        lambda said: replace(said, tool_calls=()),
    ],
)
async def test_a_real_change_starts_a_sequence(open_recorder, open_session, rewrite):
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>'
    async with open_recorder("Look:\n" + call, "ok<|im_end|>") as recorder:
        session = open_session(recorder)
        said = (await session.chat([Message("user", "hi")])).message
        await session.chat([Message("user", "hi"), rewrite(said), Message("user", "Go on.")])
        assert recorder.close_session("episode-1").breaks == {"history_rewritten": 1}
