"""Several models in one episode: frozen ones speak, and are never trained."""

import openai
import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway.request import ChatRequest
from sparring.errors import ConfigError, GatewayError
from sparring.types import Message

END = "<|im_end|>"


@pytest.fixture
def add_judge(chat, ids):
    async def add(recorder, *texts):
        engine = ScriptedEngine([ids(text + END) for text in texts])
        await engine.start()
        recorder.add_frozen("judge", engine, chat, SamplingParams(max_new_tokens=50, temperature=0.0), max_length=4096)

    return add


async def test_a_frozen_model_speaks_and_is_not_trained(serve, open_session, add_judge):
    async with serve("Five." + END) as (_, recorder, _):
        await add_judge(recorder, "Right.", "Right again.")
        session = open_session(recorder, turn_budget=1, token_budget=10)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as api:
            names = [model.id for model in (await api.models.list()).data]
            assert names == ["policy", "judge"]

            async def ask(model, text, **settings):
                said = await api.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": text}], **settings
                )
                return said.choices[0].message.content

            assert await ask("judge", "2 + 3?", temperature=0.3) == "Right."
            assert await ask("policy", "2 + 3?") == "Five."
            assert await ask("judge", "And now?") == "Right again."
        record = recorder.close_session("episode-1")
        [sequence] = record.sequences
        assert [turn.policy_id for turn in sequence.turns] == ["policy"]
        assert sequence.action_mask.sum() == len("Five.") + 1
        assert [turn.policy_id for turn in record.tree.turns] == ["judge", "policy", "judge"]
        assert not record.normalised


async def test_the_same_conversation_with_another_model_is_another_sequence(open_recorder, open_session, add_judge):
    async with open_recorder("a" + END, "b" + END) as recorder:
        await add_judge(recorder, "x")
        session = open_session(recorder)
        said = await session.chat([Message("user", "hi")])
        history = (Message("user", "hi"), said.message, Message("user", "Go on."))
        judged = await session.reply(ChatRequest(history, policy_id="judge", agent_id="judge"))
        assert judged.text == "x"
        await session.chat(history)
        record = recorder.close_session("episode-1")
        assert len(record.sequences) == 1
        assert len(record.sequences[0].turns) == 2


async def test_names_of_models_are_taken_once_and_known(open_recorder, open_session, add_judge):
    async with open_recorder() as recorder:
        await add_judge(recorder)
        with pytest.raises(ConfigError, match="judge"):
            await add_judge(recorder)
        with pytest.raises(GatewayError, match="policy, judge"):
            await open_session(recorder).reply(ChatRequest((Message("user", "x"),), policy_id="nobody"))
