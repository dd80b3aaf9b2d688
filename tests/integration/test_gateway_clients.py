"""The clients of OpenAI and Anthropic play on the embedded SmolLM2: exported tokens are the engine's, exactly."""

import json
import sys
from pathlib import Path

import anthropic
import openai
import pytest
import pytest_asyncio

from sparring.agents.policy import Outcome
from sparring.types import Message, StopReason, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from gateway_model import open_arena  # a module beside this one, which importlib mode does not find

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena(smollm2):
    async with open_arena(smollm2) as arena:
        yield arena


class ClientPolicy:
    """The plainest agent loop: ask, enter the answer, run its calls or hand it in."""

    def __init__(self, ask):
        self._ask = ask

    async def play(self, env, client):
        async with self._ask(env, client) as ask:
            while not env.done:
                said = await ask()
                await env.observe(said)
                for call in said.tool_calls:
                    await env.call_tool(call.name, call.arguments)
                if not said.tool_calls:
                    await env.finish(said.content)
        return Outcome(env.stop_reason or StopReason.ABORTED)


class ChatLoop:
    """Chat completions, streamed or not."""

    def __init__(self, env, client, stream):
        self._env, self._stream = env, stream
        self._api = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)

    async def __aenter__(self):
        await self._api.__aenter__()
        return self._turn

    async def __aexit__(self, *error):
        await self._api.__aexit__(*error)

    async def _turn(self):
        request = {
            "model": "policy",
            "messages": [message.to_openai() for message in self._env.messages],
            "tools": self._env.tools,
        }
        if self._stream:
            async with self._api.chat.completions.stream(**request) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await self._api.chat.completions.create(**request)
        said = answer.choices[0].message
        calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in said.tool_calls or ())
        return Message("assistant", said.content, calls)


class ResponsesLoop(ChatLoop):
    """The responses API: each request names the one before it and brings what is new."""

    _previous = None
    _seen = 0

    async def _turn(self):
        new = self._env.messages[self._seen :]
        request = {
            "model": "policy",
            "input": [item for message in new for item in _response_items(message)],
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in self._env.tools],
        }
        if self._previous is not None:
            request["previous_response_id"] = self._previous
        if self._stream:
            events = [event async for event in await self._api.responses.create(**request, stream=True)]
            answer = events[-1].response  # completed, or incomplete where the limit cut it
        else:
            answer = await self._api.responses.create(**request)
        self._previous, self._seen = answer.id, len(self._env.messages) + 1
        calls = [item for item in answer.output if item.type == "function_call"]
        calls = tuple(ToolCall(call.call_id, call.name, call.arguments) for call in calls)
        return Message("assistant", answer.output_text, calls)


def _response_items(message):
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    calls = [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    ]
    return [*([{"role": message.role, "content": message.content}] if message.content else []), *calls]


class MessagesLoop(ChatLoop):
    """Anthropic's messages."""

    def __init__(self, env, client, stream):
        self._env, self._stream = env, stream
        base_url = client.base_url.removesuffix("/v1")
        self._api = anthropic.AsyncAnthropic(base_url=base_url, api_key=client.api_key)

    async def _turn(self):
        system, *messages = self._env.messages
        request = {
            "model": "policy",
            "max_tokens": 40,
            "system": system.content,
            "messages": [_blocks(message) for message in messages],
            "tools": [
                {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
                for f in (tool["function"] for tool in self._env.tools)
            ],
        }
        if self._stream:
            async with self._api.messages.stream(**request) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await self._api.messages.create(**request)
        text = "".join(block.text for block in answer.content if block.type == "text")
        uses = [block for block in answer.content if block.type == "tool_use"]
        return Message("assistant", text, tuple(ToolCall(use.id, use.name, json.dumps(use.input)) for use in uses))


def _blocks(message):
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [result]}
    if message.role == "user":
        return {"role": "user", "content": message.content}
    text = [{"type": "text", "text": message.content}] if message.content else []
    uses = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in message.tool_calls
    ]
    return {"role": "assistant", "content": [*text, *uses]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("loop", [ChatLoop, ResponsesLoop, MessagesLoop])
async def test_a_client_s_episode_is_exact(arena, loop, stream):
    _, record = await arena.play(ClientPolicy(lambda env, client: loop(env, client, stream)), "train/3")
    assert len(record.sequences) == 1
    assert record.breaks.total() == 0
