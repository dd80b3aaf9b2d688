"""The recorder: what was sampled is what is exported, whatever the client does between two turns."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.gateway.request import ChatRequest
from sparring.errors import BudgetExhausted, EngineError, GatewayError
from sparring.types import Message, StopReason, ToolCall

END = "<|im_end|>"
SYSTEM, USER = Message("system", "Be brief."), Message("user", "2 + 3?")
SAMPLING = SamplingParams(max_new_tokens=256, temperature=0.7)
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 3}}\n</tool_call>'


async def test_a_conversation_with_a_tool_is_one_sequence(chat, open_recorder, open_session):
    async with open_recorder(CALL_TEXT + END, "Five." + END) as recorder:
        session = open_session(recorder)
        call = await session.chat([SYSTEM, USER])
        assert call.finish_reason == "tool_calls"
        assert [(c.name, c.arguments) for c in call.message.tool_calls] == [("add", '{"a": 2, "b": 3}')]
        answer = await session.chat([SYSTEM, USER, call.message, Message("tool", "5")])
        record = recorder.close_session("episode-1")

        assert (answer.text, answer.finish_reason) == ("Five.", "stop")
        [sequence] = record.sequences
        assert record.breaks.total() == 0
        assert chat.decode(sequence.token_ids.tolist(), special_tokens=True) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
            f"{CALL_TEXT}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\nFive.<|im_end|>"
        )
        sampled = chat.decode(sequence.token_ids[sequence.action_mask].tolist(), special_tokens=True)
        assert sampled == f"{CALL_TEXT}{END}Five.{END}"
        assert [turn.temperature for turn in sequence.turns] == [0.7, 0.7]
        assert np.all(sequence.behaviour_logprobs == np.where(sequence.action_mask, np.float32(-0.5), 0))
        assert record.messages[-1] == {"role": "assistant", "content": "Five."}
        assert len(record.messages) == 5
        assert record.usage.completion_tokens == sequence.action_mask.sum()
        assert record.usage.turns == 2


async def test_each_token_carries_the_version_that_sampled_it(open_recorder, open_session):
    async with open_recorder("One." + END, "Two." + END) as recorder:
        session = open_session(recorder)
        first = await session.chat([USER])
        await recorder.engine.update_weights(7, ())
        await session.chat([USER, first.message, USER])
        [sequence] = recorder.close_session("episode-1").sequences
        one, two = sequence.turns
        assert set(sequence.policy_versions[one.start : one.end]) == {0}
        assert set(sequence.policy_versions[two.start : two.end]) == {7}
        assert set(sequence.policy_versions[~sequence.action_mask]) == {-1}


async def test_raw_text_handed_back_is_the_same_message(open_recorder, open_session):
    async with open_recorder(CALL_TEXT + END, "Five." + END) as recorder:
        session = open_session(recorder)
        reply = await session.chat([USER])
        await session.chat([USER, Message("assistant", reply.text), Message("tool", "5")])
        assert len(recorder.close_session("episode-1").sequences) == 1


async def test_a_malformed_call_stays_text(open_recorder, open_session):
    async with open_recorder('<tool_call>{"name": "add", "argu</tool_call>' + END) as recorder:
        reply = await open_session(recorder).chat([USER])
        assert reply.message.content == reply.text == '<tool_call>{"name": "add", "argu</tool_call>'
        assert reply.message.tool_calls == ()


async def test_a_turn_cut_by_length_is_closed_by_tokens_nobody_sampled(chat, open_recorder, open_session):
    async with open_recorder("abcdef" + END, "ok" + END) as recorder:
        session = open_session(recorder)
        reply = await session.chat([USER], max_new_tokens=3)
        assert (reply.text, reply.finish_reason) == ("abc", "length")
        await session.chat([USER, reply.message, USER])
        [sequence] = recorder.close_session("episode-1").sequences
        turn = sequence.turns[0]
        after = chat.decode(sequence.token_ids[turn.end :].tolist(), special_tokens=True)
        assert after.startswith("<|im_end|>\n<|im_start|>user\n")
        assert not sequence.action_mask[turn.end]


async def test_rewritten_history_starts_a_sequence_and_says_why(open_recorder, open_session):
    async with open_recorder("One." + END, "Two." + END) as recorder:
        session = open_session(recorder)
        await session.chat([USER])
        await session.chat([USER, Message("assistant", "Edited."), USER])
        record = recorder.close_session("episode-1")
        assert len(record.sequences) == 2
        assert record.breaks == {"history_rewritten": 1}


async def test_changed_tools_start_a_sequence(open_recorder, open_session):
    async with open_recorder("One." + END, "Two." + END) as recorder:
        session = open_session(recorder)
        reply = await session.chat([USER])
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        await session.chat([USER, reply.message, USER], [tool])
        assert recorder.close_session("episode-1").breaks == {"tools_changed": 1}


async def test_parallel_samples_of_one_prompt_are_all_recorded_and_each_token_trains_once(open_recorder, open_session):
    async with open_recorder("One." + END, "Same." + END, "Same." + END, "End." + END) as recorder:
        session = open_session(recorder)
        first = await session.chat([USER])
        history = [USER, first.message, USER]
        left, right = await asyncio.gather(session.chat(history), session.chat(history))
        assert left.message == right.message
        await session.chat([*history, left.message, USER])
        record = recorder.close_session("episode-1")
        assert record.breaks == {"branched": 1}
        assert len(record.sequences) == 2
        assert sum(int(s.action_mask.sum()) for s in record.sequences) == record.usage.completion_tokens
        assert sorted(len(s.turns) for s in record.sequences) in ([1, 3], [2, 2])


async def test_interleaved_agents_each_extend_their_own_sequence(open_recorder, open_session):
    async with open_recorder(*(f"{n}" + END for n in range(6))) as recorder:
        session = open_session(recorder)
        talks = {name: [Message("system", name), USER] for name in ("planner", "worker")}
        for _ in range(3):
            for name, talk in talks.items():
                reply = await session.chat(talk, agent_id=name)
                talk += [reply.message, USER]
        record = recorder.close_session("episode-1")
        assert record.breaks == {"new_conversation": 1}
        assert [{turn.agent_id for turn in s.turns} for s in record.sequences] == [{"planner"}, {"worker"}]
        assert [len(s.turns) for s in record.sequences] == [3, 3]


async def test_the_turn_budget_is_a_truncation(open_recorder, open_session):
    async with open_recorder("One." + END) as recorder:
        session = open_session(recorder, turn_budget=1)
        reply = await session.chat([USER])
        with pytest.raises(BudgetExhausted) as caught:
            await session.chat([USER, reply.message, USER])
        assert caught.value.stop_reason == StopReason.MAX_TURNS
        assert recorder.close_session("episode-1").exhausted is StopReason.MAX_TURNS


async def test_the_token_budget_is_never_overdrawn(open_recorder, open_session):
    async with open_recorder("abcdef" + END, "ghijkl" + END) as recorder:
        session = open_session(recorder, token_budget=10)
        reply = await session.chat([USER])
        cut = await session.chat([USER, reply.message, USER])
        assert (cut.text, cut.finish_reason) == ("ghi", "length")
        with pytest.raises(BudgetExhausted) as caught:
            await session.chat([USER])
        assert caught.value.stop_reason == StopReason.MAX_TOKENS


async def test_requests_at_once_wait_for_tokens_that_others_give_back(open_recorder, open_session):
    async with open_recorder("ab" + END, "cd" + END, latency_s=0.001) as recorder:
        session = open_session(recorder, token_budget=SAMPLING.max_new_tokens)
        replies = await asyncio.gather(session.chat([USER]), session.chat([USER]))
        assert [reply.text for reply in replies] == ["ab", "cd"]


async def test_an_opening_that_does_not_fit_is_an_error_with_its_length(open_recorder, open_session):
    async with open_recorder("One.", max_length=20) as recorder:
        with pytest.raises(GatewayError, match=r"prompt of \d+ tokens.*context of 20.*max_length") as caught:
            await open_session(recorder).chat([USER])
        assert not isinstance(caught.value, BudgetExhausted)


async def test_a_full_context_later_is_a_truncation(open_recorder, open_session):
    async with open_recorder("abc" + END, max_length=70) as recorder:
        session = open_session(recorder)
        reply = await session.chat([USER])
        with pytest.raises(BudgetExhausted) as caught:
            await session.chat([USER, reply.message, Message("user", "x" * 50)])
        assert caught.value.stop_reason == StopReason.MAX_TOKENS
        assert len(recorder.close_session("episode-1").sequences) == 1


async def test_a_dead_engine_leaves_what_was_recorded(open_recorder, open_session):
    async with open_recorder("One." + END, "Two." + END) as recorder:
        session = open_session(recorder, turn_budget=2)
        reply = await session.chat([USER])
        recorder.engine.crash("the machine is gone")
        with pytest.raises(EngineError, match="the machine is gone"):
            await session.chat([USER, reply.message, USER])
        record = recorder.close_session("episode-1")
        assert [len(s.turns) for s in record.sequences] == [1]
        assert record.usage.turns == 1


async def test_an_engine_that_aborts_for_new_weights_shortens_no_answer(open_recorder, open_session, ids):
    said = ids("abcdef" + END)
    async with open_recorder(latency_s=0.001) as recorder:
        recorder.engine._script = lambda prompt: said[sum(1 for _ in _sampled(prompt, said)) :]
        session = open_session(recorder)
        heard = []
        async for part in session.stream(ChatRequest((USER,))):
            heard.append(part)
            if len(heard) == 2:
                await recorder.engine.pause("abort")
                await recorder.engine.update_weights(1, ())
                await recorder.engine.resume()
        assert "".join(part.text for part in heard) == "abcdefabcdef"  # the deltas, then the whole reply
        [sequence] = recorder.close_session("episode-1").sequences
        assert sequence.token_ids[sequence.action_mask].tolist() == said
        versions = sequence.policy_versions[sequence.action_mask].tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        assert len(recorder.engine.log) == 2


def _sampled(prompt, said):
    """The tokens at the prompt's end that an earlier part of this answer sampled."""
    count = max(n for n in range(len(said) + 1) if list(prompt[len(prompt) - n :]) == said[:n])
    return prompt[len(prompt) - count :]


async def test_evaluation_samples_by_its_own_settings(open_recorder, open_session):
    async with open_recorder("One." + END) as recorder:
        session = open_session(recorder, evaluation=SamplingParams(max_new_tokens=2, temperature=0.0))
        assert (await session.chat([USER])).text == "On"
        [sequence] = recorder.close_session("episode-1").sequences
        assert sequence.turns[0].temperature == 1.0


async def test_requests_get_seeds_of_their_own_that_repeat(chat, ids, open_session):
    async def seeds():
        seen = []

        class Spy(ScriptedEngine):
            def stream(self, token_ids, sampling, *, session_id=None):
                seen.append(sampling.seed)
                return super().stream(token_ids, sampling, session_id=session_id)

        engine = Spy(lambda _: ids("x" + END))
        await engine.start()
        recorder = Recorder(engine, chat, replace(SAMPLING, seed=3), max_length=4096)
        for name in ("a", "b"):
            session = open_session(recorder, name)
            await session.chat([USER])
            await session.chat([USER])
        await recorder.aclose()
        return seen

    first = await seeds()
    assert len(set(first)) == 4
    assert first == await seeds()


async def test_ending_a_session_ends_its_requests(open_recorder, open_session):
    async with open_recorder("One." + END, latency_s=60) as recorder:
        session = open_session(recorder)
        request = asyncio.ensure_future(session.chat([USER]))
        await asyncio.sleep(0)  # the engine has the request now
        assert (await recorder.engine.health()).running == 1
        record = recorder.close_session("episode-1")
        with pytest.raises(GatewayError, match="has ended") as caught:
            await request
        assert caught.value.status == 410
        assert record.sequences == ()
        assert (await recorder.engine.health()).running == 0
        with pytest.raises(GatewayError, match="has ended"):
            await session.chat([USER])


async def test_a_session_does_not_outlive_its_deadline(open_recorder, open_session):
    async with open_recorder("One." + END, latency_s=60) as recorder:
        session = open_session(recorder, deadline_s=0.01)
        with pytest.raises(GatewayError, match="deadline"):
            await session.chat([USER])


async def test_a_session_is_closed_while_its_deadline_ends_its_requests(open_recorder, open_session, leaves_nothing):
    async with leaves_nothing(), open_recorder("One." + END, "Two." + END, latency_s=60) as recorder:
        session = open_session(recorder, deadline_s=0.01)
        asking = [asyncio.create_task(session.chat([USER])) for _ in range(2)]
        while not any(wait.expired() for wait in session._waits):  # noqa: ASYNC110  # passed, and its request knows not
            await asyncio.sleep(0)
        assert recorder.close_session("episode-1").sequences == ()
        for request in asking:
            with pytest.raises(GatewayError, match="has ended"):
                await request
        assert not session._waits
        assert (await recorder.engine.health()).running == 0


async def test_ids_and_keys_are_taken_once(open_recorder, open_session):
    async with open_recorder() as recorder:
        session = open_session(recorder)
        with pytest.raises(GatewayError, match="already open") as caught:
            open_session(recorder)
        assert caught.value.status == 409
        with pytest.raises(GatewayError, match="api key") as caught:
            open_session(recorder, "episode-2", api_key=session.api_key)
        assert caught.value.status == 409
        recorder.close_session("episode-1")
        with pytest.raises(GatewayError, match="not open"):
            recorder.close_session("episode-1")


async def test_call_ids_repeat_and_differ_within_a_session(open_recorder, open_session):
    async def run():
        async with open_recorder(CALL_TEXT * 2 + END, CALL_TEXT + END) as recorder:
            session = open_session(recorder)
            first = await session.chat([USER])
            second = await session.chat([USER, first.message, Message("tool", "5"), Message("tool", "5")])
            return [call.id for reply in (first, second) for call in reply.message.tool_calls]

    found = await run()
    assert len(set(found)) == 3
    assert found == await run()
    assert all(len(id_) == 9 and id_.isalnum() for id_ in found)


async def test_the_same_arguments_spelled_otherwise_are_the_same_message(open_recorder, open_session):
    async with open_recorder(CALL_TEXT + END, "Five." + END) as recorder:
        session = open_session(recorder)
        await session.chat([USER])
        echoed = Message("assistant", "", tool_calls=(ToolCall("renamed", "add", '{"b":3,"a":2}'),))
        await session.chat([USER, echoed, Message("tool", "5", tool_call_id="renamed")])
        assert recorder.close_session("episode-1").breaks.total() == 0


# As Qwen3's: what was thought is shown until the user speaks again.
FORGETS_THOUGHTS = """{%- set asked = namespace(at=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.at = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.reasoning_content and loop.index0 > asked.at -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""
THOUGHT_CALL = (
    '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
)


async def test_tools_that_the_template_would_not_show_are_refused(model_folder, open_session):
    chat = ChatFormat.load(model_folder, tool_template=None, tools=False)
    engine = ScriptedEngine([[*b"Hello."]])
    await engine.start()
    session = open_session(Recorder(engine, chat, SAMPLING, max_length=4096))
    with pytest.raises(GatewayError, match=r"ignores tools: set model\.tool_template"):
        await session.chat([USER], [{"type": "function", "function": {"name": "add", "parameters": {}}}])
    assert (await session.chat([USER])).text


@pytest.mark.parametrize(("history", "sequences", "breaks"), [("sampled", 1, {}), ("template", 2, {"template": 1})])
async def test_history_by_the_template_forgets_thoughts_where_the_template_does(
    tmp_path, write_model, ids, open_session, history, sequences, breaks
):
    chat = ChatFormat.load(write_model(tmp_path, FORGETS_THOUGHTS), tool_template=None, history=history)
    engine = ScriptedEngine([ids(text + END) for text in (THOUGHT_CALL, "<think>\nSo.\n</think>\n\nFive.", "Yes.")])
    await engine.start()
    recorder = Recorder(engine, chat, SAMPLING, max_length=4096)
    session = open_session(recorder)
    talk = [USER]
    for heard in (Message("tool", "5"), Message("user", "Sure?"), None):
        talk.append((await session.chat(talk)).message)
        talk += [heard] if heard else []
    record = recorder.close_session("episode-1")
    assert (len(record.sequences), record.breaks) == (sequences, breaks)
    prompts = [chat.decode(call.prompt, special_tokens=True) for call in engine.log]
    # Within the tool loop the thought is shown by both, and what was sampled stands.
    assert prompts[1] == prompts[0] + THOUGHT_CALL + f"{END}\n<|im_start|>tool\n5{END}\n<|im_start|>assistant\n"
    assert ("So." in prompts[2]) == (history == "sampled")
    assert prompts[2].endswith(f"Sure?{END}\n<|im_start|>assistant\n")
    sampled = [id_ for sequence in record.sequences for id_ in sequence.token_ids[sequence.action_mask]]
    assert sampled == [id_ for call in engine.log for id_ in call.completion.token_ids]
    await recorder.aclose()
