"""KeyLookup: two short turns."""

import pytest

from sparring.envs.hermes import format_call, message_text
from sparring.envs.key_lookup import KeyLookup
from sparring.errors import ConfigError


@pytest.fixture
async def env():
    env = KeyLookup()
    await env.areset(options={"task_id": "train/0"})
    return env


async def test_its_texts_are_short(env):
    call, result, answer = env.demonstration()
    prompt = "".join(message_text(message) for message in env.messages)
    assert len(prompt) <= 40
    assert len(call.tool_calls[0].arguments) <= 30
    assert len(result.content) == len(answer.content) == 3


async def test_careless_demonstrations_score_less_and_are_as_many_as_asked_for():
    env, rewards = KeyLookup(careless=0.5), []
    for number in range(200):
        await env.areset(options={"task_id": f"train/{number}"})
        call, _, answer = env.demonstration()
        await env.astep(message_text(call))
        await env.astep(message_text(answer))
        rewards.append(env.reward)
    assert set(rewards) == {0.4, 1.0}
    assert 70 < rewards.count(0.4) < 130
    with pytest.raises(ConfigError, match="careless"):
        KeyLookup(careless=2)


@pytest.mark.parametrize(
    ("steps", "reward"),
    [
        (["{right}", "{value}"], 1.0),
        (["{right}", " {value}\n"], 1.0),
        (["{right}", "{value}0"], 0.4),
        (["{wrong}", "{value}"], 0.0),
        (["{wrong}", "{right}", "{value}"], 1.0),
        (["{value}"], 0.0),
        (["{right}", "{right}", "{right}"], 0.4),
    ],
)
async def test_what_is_worth_what(env, steps, reward):
    call, _, answer = env.demonstration()
    names = {
        "right": message_text(call),
        "wrong": format_call("lookup", {"key": "???"}),
        "value": answer.content,
    }
    for step in steps:
        await env.astep(step.format(**names))
    assert env.done
    assert env.reward == reward


def test_a_key_without_characters_is_refused():
    with pytest.raises(ConfigError, match="length"):
        KeyLookup(length=0)
