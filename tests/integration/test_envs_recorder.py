"""An episode through the real recorder: the native policy's conversation is one unbroken sequence of sampled tokens."""

import numpy as np
import pytest

from sparring.agents.native import NativePolicy
from sparring.agents.runner import make_runner
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.envs.hermes import message_text
from sparring.envs.key_lookup import KeyLookup
from sparring.types import EpisodeSpec, StopReason

SPEC = EpisodeSpec("episode-1", "group-1", "sparring/KeyLookup-v0", "train/0", seed=0)
SAMPLING = SamplingParams(max_new_tokens=200, temperature=1.0)
MALFORMED = '<tool_call>{"name": "lookup", "arguments": {"key"'


@pytest.fixture(scope="module")
def chat(tiny_qwen3):
    return ChatFormat.load(tiny_qwen3, tool_template="hermes-compact")


async def gold():
    env = KeyLookup()
    await env.areset(options={"task_id": SPEC.task_id})
    call, _, answer = env.demonstration()
    return message_text(call), answer.content


async def play(chat, texts, *, turn_budget=10):
    encode = chat._tokenizer.encode
    engine = ScriptedEngine([encode(f"{text}<|im_end|>", add_special_tokens=False).ids for text in texts])
    await engine.start()
    recorder = Recorder(engine, chat, SAMPLING, max_length=1000)
    session = recorder.open_session(SPEC.episode_id, turn_budget=turn_budget, token_budget=1000)
    run = make_runner(SPEC.env_id, {"max_turns": 5}, NativePolicy(), timeout_s=30)
    result = await run(SPEC, session)
    record = recorder.close_session(SPEC.episode_id)
    await recorder.aclose()
    sampled = sum(len(call.completion.token_ids) for call in engine.log)
    return result, record, sampled


@pytest.mark.slow
@pytest.mark.parametrize(
    "prefix",
    [[], [MALFORMED], ["<think>First I look it up.</think>" + MALFORMED], ["<tool_call>{}</tool_call> " * 2]],
    ids=["gold", "malformed first", "thinking", "not a call"],
)
async def test_a_conversation_is_one_sequence_and_trains_on_every_sampled_token(chat, prefix):
    call, answer = await gold()
    result, record, sampled = await play(chat, [*prefix, call, answer])
    assert (result.reward, result.stop_reason, result.failure) == (1.0, StopReason.FINISHED, None)
    assert record.breaks.total() == 0
    (sequence,) = record.sequences
    assert int(sequence.action_mask.sum()) == sampled
    assert len(sequence.turns) == len(prefix) + 2
    assert np.all(sequence.behaviour_logprobs[sequence.action_mask] == -0.5)


@pytest.mark.slow
async def test_the_sessions_turn_budget_is_a_truncation(chat):
    call, answer = await gold()
    result, record, _ = await play(chat, [call, answer], turn_budget=1)
    assert (result.reward, result.stop_reason) == (0.4, StopReason.MAX_TURNS)
    assert len(record.sequences[0].turns) == 1
