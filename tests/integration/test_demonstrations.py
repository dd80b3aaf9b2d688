"""Demonstrations are recorded like sampled episodes: the same tokens, masks and turns."""

import gymnasium
import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat
from sparring.config import RunConfig
from sparring.demonstrations import record_demonstrations
from sparring.envs import ChatEnv
from sparring.errors import ConfigError, EngineError, TaskError
from sparring.replay import replaying
from sparring.types import Message


def config(model: str, env: str, **kwargs) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": model}, "env": {"id": env, "kwargs": kwargs}})


@pytest.fixture
def chat(tiny_qwen3):
    return ChatFormat.load(tiny_qwen3, tool_template="hermes-compact", tool_format="hermes")


async def test_a_demonstration_is_a_prompt_and_its_gold_turns(chat):
    run = config("tiny-qwen3", "sparring/Calculator-v0")
    (sequence,) = await record_demonstrations(run, chat, run.env.parts[0], ["train/0"], seed=0)
    spans = [sequence.token_ids[turn.start : turn.end].tolist() for turn in sequence.turns]
    said = [chat.decode(span, special_tokens=True) for span in spans]
    assert said[0].startswith('<tool_call>{"name": "calculator"')
    assert said[0].endswith("</tool_call><|im_end|>")
    assert said[1].startswith("Answer: ")
    assert [turn.end - turn.start for turn in sequence.turns] == [
        int(sequence.action_mask[turn.start : turn.end].sum()) for turn in sequence.turns
    ]
    assert sequence.action_mask.sum() == sum(turn.end - turn.start for turn in sequence.turns)


class Mute(ChatEnv):
    """An environment without demonstrations."""

    def task_ids(self, split="train"):
        return [f"{split}/0"]

    async def _begin(self, task_id):
        return [Message("user", "Speak.")]

    async def _submit(self, answer):
        return None


class Wrong(Mute):
    """Its demonstration earns nothing."""

    def demonstration(self):
        return [Message("assistant", "Hello.")]


async def test_a_demonstration_that_teaches_something_wrong_is_refused_and_leaves_nothing_running(chat, monkeypatch):
    gymnasium.register("test/Wrong-v0", entry_point=Wrong)
    stopped = []
    stop = ScriptedEngine.stop

    async def witnessed(self):
        await stop(self)
        stopped.append(self)

    monkeypatch.setattr(ScriptedEngine, "stop", witnessed)
    run = config("tiny-qwen3", "test/Wrong-v0")
    with pytest.raises(TaskError, match=r"demonstration of train/0 in test/Wrong-v0 earns 0.0: nothing"):
        await record_demonstrations(run, chat, run.env.parts[0], ["train/0"], seed=0)
    assert len(stopped) == 1


async def test_a_recorder_of_given_replies_ends_with_its_block_however_that_ends(chat):
    with pytest.raises(RuntimeError, match="on the way"):  # noqa: PT012  # the block is what is tested
        async with replaying([[1]], chat, SamplingParams(), max_length=64) as recorder:
            recorder.open_session("x", turn_budget=1, token_budget=9)
            raise RuntimeError("on the way")
    assert not recorder.sessions
    with pytest.raises(EngineError):
        await recorder.engine.health()


async def test_an_environment_without_demonstrations_says_so(chat):
    gymnasium.register("test/Mute-v0", entry_point=Mute)
    run = config("tiny-qwen3", "test/Mute-v0")
    with pytest.raises(ConfigError, match=r"warm_start\.steps"):
        await record_demonstrations(run, chat, run.env.parts[0], ["train/0"], seed=0)
