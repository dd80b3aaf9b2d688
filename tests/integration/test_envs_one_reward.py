"""The same texts earn the same reward, whether raw, parsed by the gateway, or handed over by an adapter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.backend.gateway.formats import get_format
from sparring.envs.calculator import Calculator
from sparring.types import Message, ToolCall

CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
pieces = st.sampled_from(
    [
        CALL.format("GOLD"),
        CALL.format("1 + 1"),
        CALL.format("1 +"),
        CALL.replace("calculator", "abacus").format("1"),
        CALL.replace("expression", "expr").format("1"),
        '<tool_call>{"name": "calculator", "arguments": {"expression": "GOLD"}}',
        '<tool_call>{"name": "calculator", "arguments": {"expression": NaN}}</tool_call>',
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "\n ",
        "Answer: RIGHT",
        "Answer: 3",
        "Hm.",
    ]
)
text = st.sampled_from([CALL.format("GOLD"), "Answer: RIGHT"]) | st.lists(pieces, max_size=4).map("".join)
texts = st.lists(text, min_size=1, max_size=4)
hermes = get_format("hermes")


def as_message(text, tools):
    """The assistant message as the gateway hands it to an agent."""
    parsed = hermes.parse(text, tools)
    calls = [ToolCall(f"random_{i}", call.name, call.arguments) for i, call in enumerate(parsed.calls)]
    return Message("assistant", parsed.content, tool_calls=tuple(calls), reasoning=parsed.reasoning)


async def raw(env, text):
    await env.astep(text)


async def structured(env, text):
    await env.astep(as_message(text, env.tools))


async def adapter(env, text):
    """As an SDK drives an environment: its own loop calls the tools, and a text without a call is its final output."""
    message = as_message(text, env.tools)
    await env.observe(message)
    for call in message.tool_calls:
        await env.call_tool(call.name, call.arguments)
    if not message.tool_calls:
        await env.finish(message.content)


async def play(route, written, number):
    env = Calculator()
    await env.areset(options={"task_id": f"train/{number}"})
    call, _, answer = env.demonstration()
    expression = call.tool_calls[0].arguments.split('"')[3]
    for text in written:
        if not env.done:
            await route(env, text.replace("GOLD", expression).replace("Answer: RIGHT", answer.content))
    return env


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(written=texts, number=st.integers(0, 50))
async def test_every_route_gives_the_same_episode(written, number):
    envs = [await play(route, written, number) for route in (raw, structured, adapter)]
    assert len({(env.reward, env.turns, env.done, env.stop_reason, tuple(env.turn_rewards)) for env in envs}) == 1
    assert len({tuple(env.reward_parts.items()) for env in envs}) == 1
    results = [[message.content for message in env.messages if message.role == "tool"] for env in envs]
    ran = [[text for text in texts if "Malformed" not in text] for texts in results]
    assert ran[0] == ran[1] == ran[2]
