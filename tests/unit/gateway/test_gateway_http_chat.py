"""Chat completions over HTTP, by OpenAI's own client."""

import asyncio
import json

import openai
import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.types import StopReason

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
HELLO = [{"role": "user", "content": "2 + 3?"}]


@pytest.fixture
def client():
    """An OpenAI client of a session, which does not retry."""

    def make(session):
        return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)

    return make


async def create(client, **request):
    return await client.chat.completions.create(**({"model": "policy", "messages": HELLO} | request))


async def test_a_tool_is_called_and_answered_in_one_sequence(serve, open_session, client):
    async with serve(CALL + END, "Five." + END) as (_, recorder, _), client(session := open_session(recorder)) as api:
        first = await create(api, tools=TOOLS)
        said = first.choices[0]
        assert said.finish_reason == "tool_calls"
        assert json.loads(said.message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
        result = {"role": "tool", "tool_call_id": said.message.tool_calls[0].id, "content": "5"}
        second = await create(api, messages=[*HELLO, said.message.model_dump(), result], tools=TOOLS)
        assert second.choices[0].message.content == "Five."
        assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
        record = recorder.close_session(session.session_id)
        assert (len(record.sequences), record.breaks.total()) == (1, 0)


@pytest.mark.parametrize(
    "text", ["Plain é.", "So:\n" + CALL, CALL + CALL, "<think>\nHm.\n</think>\n\nYes.", "<tool_call>{"]
)
async def test_a_stream_says_what_the_whole_answer_says(serve, open_session, client, text):
    async with serve(text + END, text + END) as (_, recorder, _), client(open_session(recorder)) as api:
        whole = (await create(api, tools=TOOLS)).choices[0]
        async with api.chat.completions.stream(
            model="policy", messages=HELLO, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            streamed = await stream.get_final_completion()
        final = streamed.choices[0]
        assert final.finish_reason == whole.finish_reason
        assert (final.message.content or None) == (whole.message.content or None)
        calls = [(c.function.name, c.function.arguments) for c in final.message.tool_calls or []]
        assert calls == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]
        assert streamed.usage.completion_tokens == len((text + END).encode()) - len(END) + 1


async def test_several_samples_of_one_prompt(serve, open_session, client):
    async with serve("a" + END, "b" + END, "c" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        answer = await create(api, n=3)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        record = recorder.close_session("episode-1")
        assert len(record.sequences) == 3
        assert record.breaks == {"branched": 2}


async def test_several_samples_in_one_stream(serve, open_session, client):
    async with serve("ab" + END, "cd" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        texts = ["", ""]
        async for chunk in await create(api, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert sorted(texts) == ["ab", "cd"]


async def test_a_stop_string_ends_the_answer_and_is_left_out(serve, open_session, client):
    async with serve("one STOP two" + END, "x" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        chunks = [chunk async for chunk in await create(api, stop=["STOP"], stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "one "
        await create(api, messages=[*HELLO, {"role": "assistant", "content": text}, *HELLO])
        [sequence] = recorder.close_session("episode-1").sequences
        assert sequence.turns[0].end - sequence.turns[0].start == len("one STOP")


async def test_max_tokens_cuts_within_the_run_s_limit(serve, open_session, client):
    async with serve("abcdef" + END, "abcdef" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        cut = (await create(api, max_tokens=3)).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("abc", "length")
        assert (await create(api, max_completion_tokens=10_000)).choices[0].message.content == "abcdef"


async def test_logprobs(serve, open_session, client):
    async with serve("ab" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        entries = (await create(api, logprobs=True, top_logprobs=2)).choices[0].logprobs.content
        assert [entry.token for entry in entries] == ["a", "b", END]
        assert {entry.logprob for entry in entries} == {-0.5}
        assert entries[0].top_logprobs[0].token == "a"


async def test_a_forbidden_tool_call_stays_text(serve, open_session, client):
    async with serve(CALL + END) as (_, recorder, _), client(open_session(recorder)) as api:
        said = (await create(api, tools=TOOLS, tool_choice="none")).choices[0].message
        assert (said.content, said.tool_calls) == (CALL, None)


async def test_one_call_alone_where_the_client_takes_no_more(serve, open_session, client):
    async with serve(CALL + CALL + END, "x" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        said = (await create(api, tools=TOOLS, parallel_tool_calls=False)).choices[0].message
        assert len(said.tool_calls) == 1
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "5"}
        await create(api, messages=[*HELLO, said.model_dump(), result], tools=TOOLS, parallel_tool_calls=False)
        assert recorder.close_session("episode-1").breaks.total() == 0


async def test_a_training_session_samples_as_the_run_says_and_counts_it(serve, open_session, client):
    async with serve(CALL + END) as (_, recorder, _), client(open_session(recorder)) as api:
        await create(api, temperature=0, top_p=1, seed=3, frequency_penalty=1, tools=TOOLS, tool_choice="required")
        record = recorder.close_session("episode-1")
        assert record.normalised == {"temperature": 1, "seed": 1, "frequency_penalty": 1, "tool_choice": 1}
        assert record.sequences[0].turns[0].temperature == 0.7


async def test_a_training_session_refuses_a_grammar(serve, open_session, client):
    async with serve("{}" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        with pytest.raises(openai.BadRequestError, match="bias") as caught:
            await create(api, response_format={"type": "json_object"})
        assert caught.value.param == "response_format"


async def test_an_evaluation_samples_as_its_client_says(serve, open_session, client):
    evaluation = SamplingParams(max_new_tokens=2, temperature=0.0)
    async with serve("abcdef" + END) as (_, recorder, _):
        session = open_session(recorder, evaluation=evaluation)
        async with client(session) as api:
            said = (await create(api, temperature=0.5, max_tokens=6)).choices[0].message
            assert said.content == "abcdef"
            record = recorder.close_session("episode-1")
            assert record.sequences[0].turns[0].temperature == 0.5
            assert not record.normalised


async def test_an_evaluation_samples_until_the_form_is_met(serve, open_session, client):
    texts = ["no" + END, "{" + END, '{"a": 1}' + END, "no" + END, CALL + END]
    async with serve(*texts) as (_, recorder, _):
        session = open_session(recorder, evaluation=SamplingParams(max_new_tokens=256))
        async with client(session) as api:
            schema = {"name": "x", "schema": {"type": "object", "required": ["a"]}}
            said = await create(api, response_format={"type": "json_schema", "json_schema": schema})
            assert said.choices[0].message.content == '{"a": 1}'
            said = await create(api, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}})
            assert said.choices[0].message.tool_calls[0].function.name == "add"


async def test_an_evaluation_says_when_the_form_is_not_met(serve, open_session, client):
    async with serve(*["no" + END] * 8) as (_, recorder, _):
        session = open_session(recorder, evaluation=SamplingParams(max_new_tokens=256))
        async with client(session) as api:
            with pytest.raises(openai.BadRequestError, match="8 answers in a row"):
                await create(api, response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("n", 0),
        ("temperature", "hot"),
        ("top_logprobs", 3),
        ("stop", [""]),
        ("messages", []),
        ("messages", [{"role": "nobody", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}]),
        ("tools", [{"type": "function", "function": {"parameters": {}}}]),
        ("tool_choice", {"type": "function", "function": {"name": "unknown"}}),
        ("response_format", {"type": "xml"}),
    ],
)
async def test_what_cannot_be_honoured_is_named(serve, open_session, client, field, value):
    async with serve() as (_, recorder, _), client(open_session(recorder)) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await create(api, extra_body={field: value})
        assert field in caught.value.param
        assert field in caught.value.message


async def test_fields_that_change_nothing_are_accepted(serve, open_session, client):
    async with serve("ok" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
        said = await create(
            api,
            model="gpt-4o",
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}],
            user="me",
            metadata={"a": "b"},
            store=False,
            frequency_penalty=0,
            logit_bias={},
            extra_body={"never_heard_of": 1},
        )
        assert said.choices[0].message.content == "ok"
        assert not recorder.close_session("episode-1").normalised


async def test_budgets_are_errors_that_no_client_retries(serve, open_session, client):
    async with serve("ok" + END, "ok" + END) as (_, recorder, _):
        session = open_session(recorder, turn_budget=1)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=5) as api:
            await create(api)
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    await create(api, stream=stream)
                assert caught.value.code == "max_turns"
        assert recorder.close_session("episode-1").exhausted is StopReason.MAX_TURNS


async def test_an_engine_that_dies_is_a_503_and_within_a_stream_an_error(serve, open_session, client):
    async with serve("abc" + END, "abc" + END, latency_s=0.001) as (_, recorder, _), client(
        open_session(recorder)
    ) as api:
        stream = await create(api, stream=True)
        await anext(stream)
        recorder.engine.crash("the machine is gone")
        with pytest.raises(openai.APIError, match="the machine is gone"):
            [chunk async for chunk in stream]
        with pytest.raises(openai.InternalServerError) as caught:
            await create(api)
        assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_token_s", [0.001, 60.0])
async def test_a_client_that_goes_away_ends_its_generation(serve, open_session, http_body, stream, first_token_s):
    async with serve("a" * 1000 + END, latency_s=first_token_s) as (_, recorder, http):
        session = open_session(recorder)
        headers = {"authorization": f"Bearer {session.api_key}"}
        request = asyncio.ensure_future(
            http.post("/v1/chat/completions", json=http_body(stream=stream), headers=headers, timeout=30)
        )
        async with asyncio.timeout(5):
            await until(lambda: recorder.engine._running == 1)
            request.cancel()
            await until(lambda: recorder.engine._running == 0)
        assert recorder.close_session("episode-1").sequences == ()


@pytest.fixture
def http_body():
    return lambda **fields: {"model": "policy", "messages": HELLO, "max_tokens": 1000} | fields


async def until(condition):
    while not condition():  # noqa: ASYNC110  # what is waited for is on the other side of a socket
        await asyncio.sleep(0.001)


@pytest.mark.slow
async def test_forty_turns_are_one_sequence(serve, open_session, client):
    texts = [CALL + END, "Five.\n" + END] * 20
    async with serve(*texts, max_length=100_000) as (_, recorder, _), client(open_session(recorder)) as api:
        history = list(HELLO)
        for turn in range(40):
            said = (await create(api, messages=history, tools=TOOLS)).choices[0].message
            history.append(said.model_dump(exclude_unset=bool(turn % 3)))
            calls = said.tool_calls or ()
            history += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
            if not said.tool_calls:
                history.append({"role": "user", "content": [{"type": "text", "text": "And now?"}]})
        record = recorder.close_session("episode-1")
        assert (len(record.sequences), record.breaks.total()) == (1, 0)
        assert len(record.sequences[0].turns) == 40
