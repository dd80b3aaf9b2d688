"""Anthropic's messages API, by Anthropic's own client."""

import anthropic
import pytest

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOOLS = [{"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}]
HELLO = [{"role": "user", "content": "2 + 3?"}]


@pytest.fixture
def client():
    def make(session):
        base_url = session.base_url.removesuffix("/v1")
        return anthropic.AsyncAnthropic(base_url=base_url, api_key=session.api_key, max_retries=0)

    return make


async def create(client, **request):
    return await client.messages.create(
        **({"model": "policy", "max_tokens": 200, "messages": HELLO, "system": "Be brief."} | request)
    )


async def test_blocks_handed_back_are_the_same_conversation(serve, open_session, client):
    async with serve("So:\n" + CALL + END, "Five." + END) as (_, recorder, _):
        async with client(open_session(recorder)) as api:
            first = await create(api, tools=TOOLS)
            assert [block.type for block in first.content] == ["text", "tool_use"]
            assert (first.stop_reason, first.content[1].input) == ("tool_use", {"a": 2, "b": 3})
            result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "5"}
            history = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await create(api, messages=history, tools=TOOLS)
            assert (second.content[0].text, second.stop_reason) == ("Five.", "end_turn")
        record = recorder.close_session("episode-1")
        assert (len(record.sequences), record.breaks.total()) == (1, 0)
        assert [message["role"] for message in record.messages] == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("text", ["Five.", "", CALL, "So:\n" + CALL + CALL, "<think>\nHm.\n</think>\n\nYes."])
async def test_a_stream_adds_up_to_the_whole_answer(serve, open_session, client, text):
    async with serve(text + END, text + END) as (_, recorder, _), client(open_session(recorder)) as api:
        whole = await create(api, tools=TOOLS)
        async with api.messages.stream(model="policy", max_tokens=200, messages=HELLO, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
        assert _plain(streamed.content) == _plain(whole.content)
        assert streamed.stop_reason == whole.stop_reason
        assert streamed.usage.output_tokens == whole.usage.output_tokens


def _plain(blocks):
    return [(b.type, getattr(b, "text", None), getattr(b, "input", None), getattr(b, "thinking", None)) for b in blocks]


async def test_stop_sequences_and_limits_have_their_reasons(serve, open_session, client):
    texts = "one STOP two" + END, "abcdef" + END
    async with serve(*texts) as (_, recorder, _), client(open_session(recorder)) as api:
        stopped = await create(api, stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        assert stopped.content[0].text == "one "
        assert (await create(api, max_tokens=3)).stop_reason == "max_tokens"


async def test_errors_have_anthropic_s_form(serve, open_session, client):
    async with serve("ok" + END) as (_, recorder, _):
        session = open_session(recorder, turn_budget=1)
        async with client(session) as api:
            await create(api)
            with pytest.raises(anthropic.BadRequestError) as caught:
                await create(api)
            assert caught.value.body["error"]["type"] == "invalid_request_error"
        recorder.close_session("episode-1")
        async with client(session) as api:
            with pytest.raises(anthropic.AuthenticationError):
                await create(api)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("messages", []),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "system", "content": "x"}]),
        ("messages", [{"role": "user", "content": [3]}]),
        ("system", [{"type": "image"}]),
        ("tools", [{"type": "bash_20250124", "name": "bash"}]),
        ("tools", [{"name": "f", "input_schema": 3}]),
        ("tool_choice", {"type": "tool", "name": "unknown"}),
        ("stop_sequences", [""]),
    ],
)
async def test_what_cannot_be_honoured_is_named(serve, open_session, client, field, value):
    async with serve() as (_, recorder, _), client(open_session(recorder)) as api:
        with pytest.raises(anthropic.BadRequestError, match=field):
            await create(api, extra_body={field: value})


@pytest.mark.slow
async def test_forty_turns_are_one_sequence(serve, open_session, client):
    texts = ["So:\n" + CALL + END, "Five.\n" + END] * 20
    async with serve(*texts, max_length=100_000) as (_, recorder, _), client(open_session(recorder)) as api:
        history = list(HELLO)
        for _ in range(40):
            answer = await create(api, messages=history, tools=TOOLS)
            history.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            uses = [block for block in answer.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "5"} for use in uses]
            history.append({"role": "user", "content": results or "And now?"})
        record = recorder.close_session("episode-1")
        assert (len(record.sequences), record.breaks.total()) == (1, 0)
        assert len(record.sequences[0].turns) == 40
