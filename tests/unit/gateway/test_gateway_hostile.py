"""Requests that nobody should send: each gets a 4xx with a reason, none breaks the server, a session or a record."""

import asyncio
import copy
import itertools
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import Recorder
from sparring.backend.gateway.http import GatewayServer

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SAMPLING = SamplingParams(max_new_tokens=64, temperature=0.7)
HELLO = [{"role": "user", "content": "2 + 3?"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
FULL = {
    CHAT: {
        "model": "gpt-4o",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALLED, CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "n": 2,
        "stop": ["x"],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 5,
        "logit_bias": {"5": 1.0},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
    },
    RESPONSES: {
        "model": "gpt-4o",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "5"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "max_output_tokens": 9,
    },
    MESSAGES: {
        "model": "claude",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}]},
        ],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "add"},
        "stop_sequences": ["x"],
        "top_k": 5,
    },
}


@pytest.fixture
def ask(serve, open_session):
    """Send one request to a fresh session, of training or an evaluation, and give the answer and the record."""

    async def ask_(path, content, *, evaluation=False, headers=None):
        async with serve(*["Five." + END] * 4, max_length=100_000) as (_, recorder, http):
            session = open_session(recorder, evaluation=SAMPLING if evaluation else None)
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            key = {"authorization": f"Bearer {session.api_key}"} | (headers or {})
            answer = await http.post(path, content=raw, headers=key)
            assert (await http.post(CHAT, json={"messages": HELLO}, headers=key)).status_code == 200, "it lives on"
            return answer, recorder.close_session("episode-1")

    return ask_


def asking(**fields):
    return {"messages": HELLO} | fields


DEEP = {}
for _ in range(300):
    DEEP = {"a": DEEP}
HUGE_NUMBER = b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, b"", None),
        (CHAT, b"{", None),
        (CHAT, b"\xff\xfe{}", None),
        (CHAT, b"nul", None),
        (CHAT, b'"text"', None),
        (CHAT, b"[" * 50_000, None),
        (CHAT, b'{"a":' * 50_000, None),
        (CHAT, HUGE_NUMBER, None),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', None),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', None),
        (RESPONSES, b'{"input": "x", "metadata": {"a": -1e999}}', None),
        (CHAT, asking(max_tokens=-1), "max_tokens"),
        (CHAT, asking(max_tokens=0), "max_tokens"),
        (CHAT, asking(max_tokens=True), "max_tokens"),
        (CHAT, asking(max_completion_tokens=2.5), "max_completion_tokens"),
        (CHAT, asking(n=129), "n"),
        (CHAT, asking(temperature=-0.1), "temperature"),
        (CHAT, asking(top_p=0), "top_p"),
        (CHAT, asking(top_k=10**30), "top_k"),
        (CHAT, asking(stop=["x"] * 65), "stop"),
        (CHAT, asking(stop=[None]), "stop"),
        (CHAT, asking(messages={"role": "user"}), "messages"),
        (CHAT, asking(messages=["x"]), "messages[0]"),
        (CHAT, asking(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
        (CHAT, asking(messages=[{"role": "user", "content": [{"type": ["text"]}]}]), "messages[0].content"),
        (CHAT, asking(messages=[{"role": "user", "content": [{"type": "text", "text": None}]}]), "messages[0].content"),
        (CHAT, asking(messages=[{"role": "user", "content": ["x"]}]), "messages[0].content"),
        (CHAT, asking(messages=[{"role": ["user"], "content": "x"}]), "messages[0].role"),
        (CHAT, asking(messages=[{"role": "assistant", "tool_calls": "x"}]), "messages[0].tool_calls"),
        (CHAT, asking(messages=[{"role": "assistant", "tool_calls": [{"function": "x"}]}]), "messages[0].tool_calls"),
        (CHAT, asking(tool_choice={"type": "function", "function": "add"}), "tool_choice"),
        (CHAT, asking(tool_choice={"type": "function", "function": {"name": ["add"]}}), "tool_choice"),
        (CHAT, asking(tools=[{"type": "function", "function": {"name": ""}}]), "tools[0]"),
        (CHAT, asking(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]), "tools[0]"),
        (CHAT, asking(response_format={"type": "json_schema", "json_schema": {"schema": []}}), "response_format"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "reasoning", "content": 5}, {"type": "nonsense"}]}, "input[1]"),
        (RESPONSES, {"input": "x", "text": {"format": "json"}}, "text.format"),
        (RESPONSES, {"input": "x", "text": {"format": ["json"]}}, "text.format"),
        (RESPONSES, {"input": "x", "previous_response_id": "episode-2-0"}, "interaction_id"),
        (MESSAGES, FULL[MESSAGES] | {"tool_choice": {"type": "tool", "name": []}}, None),
        (MESSAGES, FULL[MESSAGES] | {"tool_choice": {"type": ["tool"]}}, None),
        (MESSAGES, {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": 5}]}, None),
        (MESSAGES, {"model": "m", "max_tokens": -5, "messages": HELLO}, None),
    ],
)  # fmt: skip
async def test_what_no_client_should_send_is_a_400(ask, path, body, param):
    answer, record = await ask(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"]
    if param is not None:
        assert error["param"].startswith(param)
    assert record.usage.turns == 1


@pytest.mark.parametrize("path", FULL)
@pytest.mark.parametrize("stream", [False, True])
async def test_lone_surrogates_are_no_server_error_wherever_they_stand(ask, path, stream):
    document = {**FULL[path], "stream": stream, "tool_choice": None, "response_format": None, "text": None}
    text = (
        json.dumps(document)
        .replace("gpt-4o", "\\ud800")
        .replace("claude", "\\udfff")
        .replace('"b"', '"\\udc00\\ud83d\\ude00"')
    )
    text = text.replace("Be brief.", "\\ud800 brief").replace("add", "ad\\udddd")
    answer, record = await ask(path, text.encode())
    assert answer.status_code == 200, answer.text
    assert record.usage.turns >= 2


@pytest.mark.parametrize(
    "name", ["a b", "é世", "f" * 5000, "<|im_end|>", "</tool_call>", "{{ 7 * 7 }}", "../../etc", '"', "x\ny", "\u0000"]
)
async def test_odd_names_of_tools_are_names_and_nothing_else(ask, name):
    tool = {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    called = {"role": "assistant", "tool_calls": [CALLED | {"id": name, "function": {"name": name, "arguments": name}}]}
    result = {"role": "tool", "tool_call_id": name, "name": name, "content": name}
    answer, record = await ask(CHAT, asking(tools=[tool], messages=[*HELLO, called, result]))
    assert answer.status_code == 200
    assert {turn.end - turn.start for s in record.sequences for turn in s.turns} == {len("Five.") + 1}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"multipleOf": 1e-300},
        {"$schema": "http://127.0.0.1:9/dialect", "type": "string"},
        DEEP,
    ],
)
async def test_a_schema_fetches_nothing_and_breaks_nothing(serve, open_session, schema):
    async with serve(*["1" + "0" * 400 + END] * 20, sampling=SamplingParams(max_new_tokens=500)) as (_, recorder, http):
        session = open_session(recorder, evaluation=SamplingParams(max_new_tokens=500))
        headers = {"authorization": f"Bearer {session.api_key}"}
        body = asking(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
        answer = await http.post(CHAT, json=body, headers=headers)
        assert answer.status_code in (200, 400), answer.text


async def test_the_same_call_id_in_every_message_confuses_nothing(serve, open_session):
    """Models that write their ids themselves (Kimi) repeat them, and clients make their own."""
    async with serve(*["So:\n" + CALL + END] * 4, "Five." + END) as (_, recorder, http):
        headers = {"authorization": f"Bearer {open_session(recorder).api_key}"}
        messages = list(HELLO)
        for _ in range(4):
            said = (await http.post(CHAT, json={"messages": messages}, headers=headers)).json()["choices"][0]["message"]
            said["tool_calls"][0]["id"] = "same"
            messages += [said, {"role": "tool", "tool_call_id": "same", "content": "5"}]
        assert (await http.post(CHAT, json={"messages": messages}, headers=headers)).status_code == 200
        record = recorder.close_session("episode-1")
        assert (len(record.sequences), record.breaks.total()) == (1, 0)


@pytest.mark.parametrize("header", ["Bearer", "Basic eDp5", "Bearer \xff\xfe", "Bearer a b"])
async def test_what_is_no_key(serve, header):
    async with serve() as (_, _, http):
        for path in (CHAT, RESPONSES, MESSAGES, "/rl/set_reward", "/rl/end_session", "/rl/start_session"):
            answer = await http.post(path, content=b"{}", headers={"authorization": header.encode("latin-1")})
            assert answer.status_code in (401, 403), (path, answer.text)


async def test_routes_and_methods_that_are_not_there(serve):
    async with serve() as (server, _, http):
        admin = {"authorization": f"Bearer {server.admin_key}"}
        assert (await http.get(CHAT, headers=admin)).status_code == 405
        for path in ("/", "/docs", "/openapi.json", "/v1/embeddings", "/rl/../metrics/../rl", "/v1/chat/completions/"):
            assert (await http.post(path, headers=admin, content=b"{}")).status_code in (404, 405, 307), path


async def test_a_task_id_that_is_a_novel_is_refused(serve):
    async with serve() as (server, recorder, http):
        admin = {"authorization": f"Bearer {server.admin_key}"}
        for body in (
            {"task_id": "x" * 10_000},
            {"task_id": "t", "api_key": "k" * 10_000},
            {"task_id": "t", "deadline_s": -1},
        ):
            assert (await http.post("/rl/start_session", json=body, headers=admin)).status_code == 422
        odd = await http.post("/rl/start_session", content=b'{"task_id": "\\ud800"}', headers=admin)
        assert odd.json()["session_id"] == "?-0"
        assert len(recorder.sessions) == 1


async def test_an_export_whose_client_goes_away_loses_no_record(serve):
    async with serve("Five." + END) as (server, _, http):
        admin = {"authorization": f"Bearer {server.admin_key}"}
        started = (await http.post("/rl/start_session", json={"task_id": "task"}, headers=admin)).json()
        key = {"authorization": f"Bearer {started['api_key']}"}
        await http.post(CHAT, json={"messages": HELLO}, headers=key)
        export = {"session_id": started["session_id"]}
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/export_trajectories", json=export, headers=admin, timeout=0.1)
        async with asyncio.timeout(5):
            while "_disconnected" in str(asyncio.all_tasks()):  # noqa: ASYNC110  # the server notices on its own
                await asyncio.sleep(0.01)
        await http.post("/rl/end_session", headers=key)
        exported = await http.post("/export_trajectories", json=export, headers=admin)
        assert len(exported.json()["interactions"]) == 1


POISON = st.sampled_from(
    [
        None, True, False, 0, -1, 2, 1e308, -0.5, 10**30, "", "x", "auto", "text", "\ud800", "<|im_end|>", "\u0000",
        "é世" * 500, [], {}, [[]], [{}], ["x"], [None], {"type": ["x"]}, {"type": "text"}, {"type": {}},
        {"function": "x"}, {"name": []},
        {"$ref": "#"}, {"type": "nothing"}, DEEP,
    ]
)  # fmt: skip


def places(document, path=()):
    """Every place in a JSON document."""
    yield path
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from places(value, (*path, key))


def poisoned(document, path, value):
    document = copy.deepcopy(document)
    *parents, last = path
    part = document
    for key in parents:
        part = part[key]
    part[last] = value
    return document


REQUESTS = st.sampled_from(sorted(FULL)).flatmap(
    lambda route: st.tuples(
        st.just(route),
        st.lists(st.tuples(st.sampled_from([p for p in places(FULL[route]) if p]), POISON), min_size=1, max_size=3),
        st.booleans(),  # streamed
        st.booleans(),  # of an evaluation
    )
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(REQUESTS, min_size=10, max_size=20))
def test_whatever_is_sent_is_answered_and_nothing_is_left(chat, ids, leaves_nothing, requests):
    asyncio.run(_send(chat, ids, leaves_nothing, requests))


async def _send(chat, ids, leaves_nothing, requests):
    says = itertools.cycle([ids(text + END) for text in ("Five.", CALL, '{"a": 1}', "<think>\nHm.", "<tool_call>{")])
    async with leaves_nothing():
        engine = ScriptedEngine(lambda _: next(says))
        await engine.start()
        recorder = Recorder(engine, chat, SAMPLING, max_length=20_000)
        keys = [
            recorder.open_session(name, turn_budget=10_000, token_budget=10**6, evaluation=evaluation).api_key
            for name, evaluation in (("training", None), ("evaluation", SAMPLING))
        ]
        async with GatewayServer(recorder) as server, httpx.AsyncClient(timeout=30) as http:
            for route, poisons, stream, evaluation in requests:
                body = {**FULL[route], "stream": stream}
                for path, value in poisons:
                    try:
                        body = poisoned(body, path, value)
                    except (KeyError, IndexError, TypeError):
                        continue  # the place went with what an earlier one replaced
                headers = {"authorization": f"Bearer {keys[evaluation]}"}
                url = server.base_url.removesuffix("/v1") + route
                answer = await http.post(url, content=json.dumps(body).encode(), headers=headers)
                assert answer.status_code in (200, 400), (body, answer.text)
                answer.text.encode()
        assert engine._running == 0
        for name in ("training", "evaluation"):
            record = recorder.close_session(name)
            assert len(record.sequences) == (record.breaks.total() + 1 if record.usage.turns else 0)
        await recorder.aclose()
        assert not recorder.sessions
