"""What the answers of strange endpoints mean: budgets, hopeless requests, faults of a moment."""

import asyncio
import json
import re

import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.gateway import Endpoint
from sparring.errors import BudgetExhausted, ConfigError, EngineError, GatewayError
from sparring.types import Message

USER = [Message("user", "Hi")]
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def answer(**message) -> tuple[int, dict]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, **message}}
    about = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    return 200, {**about, "choices": [choice], "usage": USAGE}


def error(status: int, message: str, **fields) -> tuple[int, dict]:
    return status, {"error": {"message": message, **fields}}


@pytest.fixture
async def serve():
    """Start a server that gives these answers in turn; the endpoint, and the bodies that it was sent."""
    stacks = []

    async def start(*answers: tuple[int, dict]) -> tuple[Endpoint, list[dict]]:
        bodies, rest = [], list(answers)

        async def handle(reader, writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head.lower())[1]
                bodies.append(json.loads(await reader.readexactly(int(length))))
                status, document = rest.pop(0)
                body = json.dumps(document).encode()
                head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)

        async def quietly(reader, writer):
            try:
                await handle(reader, writer)
            except asyncio.IncompleteReadError:
                writer.close()

        server = await asyncio.start_server(quietly, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        sampling = SamplingParams(max_new_tokens=50, temperature=0.5)
        endpoint = Endpoint("m", base_url=url, api_key="sk-very-secret", sampling=sampling)
        stacks.append((server, endpoint))
        return endpoint, bodies

    yield start
    for server, endpoint in stacks:
        await endpoint.aclose()
        server.close()


def session(endpoint: Endpoint, **budgets):
    return endpoint.open_session("s", **{"turn_budget": 5, "token_budget": 60, **budgets})


async def test_a_session_keeps_what_was_said_and_what_it_cost(serve):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    endpoint, bodies = await serve(answer(tool_calls=[call]), answer(content="4"))
    client = session(endpoint)
    reply = await client.chat(USER, [{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert reply.message.tool_calls[0].name == "f"
    thought = Message("assistant", "4", reasoning="hm")
    await client.chat([*USER, thought, *USER])
    assert "reasoning_content" not in bodies[1]["messages"][1]
    assert [(body["max_tokens"], body["temperature"]) for body in bodies] == [(50, 0.5), (50, 0.5)]
    record = endpoint.close_session("s")
    assert (record.usage.turns, record.usage.completion_tokens, len(record.messages)) == (2, 4, 4)
    with pytest.raises(GatewayError, match="has ended"):
        await client.chat(USER)


async def test_budgets_hold_here_too(serve):
    endpoint, bodies = await serve(answer(content="a"), answer(content="b"))
    client = session(endpoint, turn_budget=2, token_budget=3)
    await client.chat(USER)
    await client.chat(USER)
    assert [body["max_tokens"] for body in bodies] == [3, 1]
    with pytest.raises(BudgetExhausted, match="2 turns"):
        await client.chat(USER)


async def test_a_context_that_is_full_is_a_budget_unless_the_task_never_fitted(serve):
    full = error(400, "This model's maximum context length is 100 tokens")
    coded = error(400, "too long", code="context_length_exceeded")
    endpoint, _ = await serve(full, answer(content="a"), coded)
    client = session(endpoint)
    with pytest.raises(GatewayError, match="maximum context length") as failure:
        await client.chat(USER)
    assert not isinstance(failure.value, BudgetExhausted)
    await client.chat(USER)
    with pytest.raises(BudgetExhausted) as exhausted:
        await client.chat(USER)
    assert exhausted.value.stop_reason == "max_tokens"


async def test_models_that_name_the_limit_otherwise_are_asked_again_once(serve):
    refusal = error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    endpoint, bodies = await serve(refusal, answer(content="a"), answer(content="b"))
    client = session(endpoint)
    await client.chat(USER)
    await client.chat(USER)
    assert ["max_tokens" in body for body in bodies] == [True, False, False]
    assert bodies[1]["max_completion_tokens"] == 50


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, ConfigError), (403, ConfigError), (404, ConfigError), (400, EngineError), (422, EngineError)],
)
async def test_a_refusal_says_what_and_where_and_hides_the_key(serve, status, kind):
    endpoint, _ = await serve(error(status, "not with sk-very-secret"))
    with pytest.raises(kind, match=r"model 'm' at http://127\.0\.0\.1.*not with \*\*\*"):
        await session(endpoint).chat(USER)


async def test_a_fault_of_a_moment_is_tried_again(serve):
    endpoint, bodies = await serve(error(503, "busy"), answer(content="a"))
    assert (await session(endpoint).chat(USER)).text == "a"
    assert len(bodies) == 2


async def test_the_check_finds_what_is_wrong_before_anything_is_played(serve):
    endpoint, bodies = await serve(answer(content="a"), error(400, "no such model"))
    await endpoint.check()
    assert bodies[0]["max_tokens"] == 1
    with pytest.raises(ConfigError, match="no such model"):
        await endpoint.check()


async def test_an_answer_without_choices_is_a_failure(serve):
    status, document = answer()
    endpoint, _ = await serve((status, {**document, "choices": []}))
    with pytest.raises(EngineError, match="without choices"):
        await session(endpoint).chat(USER)
