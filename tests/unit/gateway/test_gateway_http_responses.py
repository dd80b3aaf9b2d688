"""The responses API, by OpenAI's own client."""

import openai
import pytest

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}]


@pytest.fixture
def client():
    def make(session):
        return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)

    return make


async def create(client, **request):
    return await client.responses.create(**({"model": "policy", "input": "2 + 3?"} | request))


async def test_items_handed_back_are_the_same_conversation(serve, open_session, client):
    async with serve("So:\n" + CALL + END, "Five." + END, "Yes." + END) as (_, recorder, _):
        async with client(open_session(recorder)) as api:
            first = await create(api, instructions="Be brief.", tools=TOOLS)
            assert [item.type for item in first.output] == ["message", "function_call"]
            items = [{"role": "user", "content": "2 + 3?"}, *(item.model_dump() for item in first.output)]
            items.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "5"})
            second = await create(api, input=items, instructions="Be brief.", tools=TOOLS)
            assert second.output_text == "Five."
            items += [item.model_dump() for item in second.output]
            items.append({"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]})
            third = await create(api, input=items, instructions="Be brief.", tools=TOOLS)
            assert third.output_text == "Yes."
        record = recorder.close_session("episode-1")
        assert (len(record.sequences), record.breaks.total()) == (1, 0)


async def test_previous_response_id_extends_the_conversation(serve, open_session, client):
    async with serve(CALL + END, "Five." + END, "Yes." + END) as (_, recorder, _):
        async with client(open_session(recorder)) as api:
            first = await create(api, instructions="Be brief.", tools=TOOLS)
            result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "5"}
            second = await create(
                api, input=[result], previous_response_id=first.id, instructions="Be brief.", tools=TOOLS
            )
            await create(
                api, input="Sure?", previous_response_id=second.id, instructions="Be brief.", tools=TOOLS
            )
            with pytest.raises(openai.BadRequestError, match="resp_unknown"):
                await create(api, previous_response_id="resp_unknown")
        record = recorder.close_session("episode-1")
        assert (len(record.sequences), record.breaks.total()) == (1, 0)
        assert [message["role"] for message in record.messages] == [
            "system", "user", "assistant", "tool", "assistant", "user", "assistant"
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Five.", ["message"]),
        ("", ["message"]),
        (CALL, ["function_call"]),
        ("So:\n" + CALL + CALL, ["message", "function_call", "function_call"]),
        ("<think>\nHm.\n</think>\n\nYes.", ["reasoning", "message"]),
    ],
)
async def test_a_stream_ends_with_what_the_whole_answer_is(serve, open_session, client, text, kinds):
    async with serve(text + END, text + END) as (_, recorder, _), client(open_session(recorder)) as api:
        whole = await create(api, tools=TOOLS)
        events = [event async for event in await create(api, tools=TOOLS, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        final = events[-1]
        assert final.type == "response.completed"
        assert [item.type for item in final.response.output] == kinds == [item.type for item in whole.output]
        assert final.response.output_text == whole.output_text
        added = [(e.output_index, e.item.type) for e in events if e.type == "response.output_item.added"]
        done = [(e.output_index, e.item.type) for e in events if e.type == "response.output_item.done"]
        assert added == done == list(enumerate(kinds))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text


async def test_the_client_s_own_stream_helper_understands(serve, open_session, client):
    async with serve("So:\n" + CALL + END) as (_, recorder, _), client(open_session(recorder)) as api:
        async with api.responses.stream(model="policy", input="2 + 3?", tools=TOOLS) as stream:
            final = await stream.get_final_response()
        assert final.output[1].arguments == '{"a": 2, "b": 3}'


async def test_an_answer_cut_short_is_incomplete(serve, open_session, client):
    async with serve("abcdef" + END) as (_, recorder, _), client(open_session(recorder)) as api:
        answer = await create(api, max_output_tokens=3)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output_text == "abc"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("tools", [{"type": "web_search"}]),
        ("text", {"format": {"type": "xml"}}),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"type": "function_call", "name": "f"}]),
        ("input", []),
    ],
)
async def test_what_cannot_be_honoured_is_named(serve, open_session, client, field, value):
    async with serve() as (_, recorder, _), client(open_session(recorder)) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await create(api, extra_body={field: value})
        assert field in caught.value.message or caught.value.param == "messages"


@pytest.mark.slow
async def test_forty_turns_are_one_sequence(serve, open_session, client):
    texts = ["So:\n" + CALL + END, "Five.\n" + END] * 20
    async with serve(*texts, max_length=100_000) as (_, recorder, _), client(open_session(recorder)) as api:
        items = [{"role": "user", "content": "2 + 3?"}]
        for _ in range(40):
            answer = await create(api, input=items, tools=TOOLS, instructions="Be brief.")
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"} for call in calls]
            items += [] if calls else [{"role": "user", "content": "And now?"}]
        record = recorder.close_session("episode-1")
        assert (len(record.sequences), record.breaks.total()) == (1, 0)
        assert len(record.sequences[0].turns) == 40
