"""Laws of the recorder: any interleaving of turns exports every prompt and every sampled token exactly, once."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import Recorder
from sparring.types import Message

TEXTS = st.sampled_from(
    ["", "Yes.", "é世", "<think>", "<|im_start|>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', " \n"]
)
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "talk": st.integers(0, 2),  # which of three agents speaks
            "says": TEXTS,
            "ends": st.booleans(),  # by an end-of-turn token, or cut short
            "hears": st.sampled_from(["ok", "<|im_end|>", "5", ""]),
            "then": st.sampled_from(["extend", "raw", "rewrite", "forget", "retry", "twice", "insert"]),
        }
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_sequences_are_the_prompts_and_what_was_sampled(chat, steps):
    engine, record = asyncio.run(_play(chat, steps))
    sequences = record.sequences

    marks = [(s, turn) for s in sequences for turn in s.turns]
    assert len(marks) == len(engine.log)  # every model call is marked once
    calls = [(call.prompt, tuple(call.completion.token_ids)) for call in engine.log]
    marked = [(tuple(s.token_ids[: t.start].tolist()), tuple(s.token_ids[t.start : t.end].tolist())) for s, t in marks]
    assert sorted(marked) == sorted(calls)
    for sequence in sequences:
        inside = {i for turn in sequence.turns for i in range(turn.start, turn.end)}
        assert inside == set(sequence.action_mask.nonzero()[0].tolist())
    assert len(sequences) - 1 == record.breaks.total()
    assert record.usage.completion_tokens == sum(len(said) for _, said in calls)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(TEXTS, st.booleans(), st.booleans()), min_size=1, max_size=15))
def test_a_client_that_only_appends_gets_one_sequence(chat, turns):
    steps = [
        {"talk": 0, "says": says, "ends": ends, "hears": "ok", "then": "raw" if raw else "extend"}
        for says, ends, raw in turns
    ]
    _, record = asyncio.run(_play(chat, steps))
    assert len(record.sequences) == 1
    assert not record.breaks


async def _play(chat, steps):
    says = iter(())

    def script(_):
        return next(says)

    engine = ScriptedEngine(script)
    await engine.start()
    recorder = Recorder(engine, chat, SamplingParams(max_new_tokens=500), max_length=100_000)
    session = recorder.open_session("s", turn_budget=1000, token_budget=100_000)
    talks = [[Message("system", str(n)), Message("user", "hi")] for n in range(3)]
    for step in steps:
        talk, then = talks[step["talk"]], step["then"]
        ids = chat._tokenizer.encode(step["says"], add_special_tokens=False).ids
        ids += [chat.end_ids[0]] if step["ends"] or not ids else []
        says = iter([ids, ids])
        requests = [session.chat(tuple(talk)) for _ in range(2 if then == "twice" else 1)]
        reply = (await asyncio.gather(*requests))[0]
        heard = Message("user", step["hears"])
        if then in ("extend", "twice"):
            talk += [reply.message, heard]
        elif then == "raw":
            talk += [Message("assistant", reply.text), heard]
        elif then == "rewrite":
            talk += [Message("assistant", "Something else."), heard]
        elif then == "insert":
            talk += [reply.message, heard, Message("assistant", "Inserted."), heard]
        elif then == "forget":
            del talk[2:]
    record = recorder.close_session("s")
    await recorder.aclose()
    return engine, record
