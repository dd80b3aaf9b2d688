"""`POST /v1/responses`: the Agents SDK's default."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from sparring.backend.gateway.http.addressed import addressed
from sparring.backend.gateway.http.body import Body, read_body
from sparring.backend.gateway.http.errors import openai_error
from sparring.backend.gateway.http.logprobs import token_logprobs
from sparring.backend.gateway.http.openai_messages import tool_choice_of
from sparring.backend.gateway.http.response_items import output_items, read_input
from sparring.backend.gateway.http.streams import event, event_stream, unless_disconnected
from sparring.backend.gateway.request import ChatRequest, RecordedReply
from sparring.backend.gateway.schemas import check_schema, check_tools
from sparring.backend.gateway.served import POLICY
from sparring.backend.gateway.session import Session
from sparring.errors import GatewayError, SparringError
from sparring.types import Message

__all__ = ["responses"]

_LOGPROBS = "message.output_text.logprobs"
_UNMET = ("background", "conversation", "prompt")


class _ResponseBody(Body):
    model: str = POLICY
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None


async def responses(request: Request, session: Session) -> Response:
    body = await read_body(request, _ResponseBody)
    asked = addressed(_read(body, session), request, session, body.model)
    if body.stream:
        return await event_stream(request, _events(session, body, asked))
    reply = await unless_disconnected(request, session.reply(asked))
    return JSONResponse(_response(session, body, asked, reply))


def _read(body: _ResponseBody, session: Session) -> ChatRequest:
    for name in _UNMET:
        if (body.model_extra or {}).get(name):
            raise GatewayError(f"{name} is not supported", param=name)
    messages = read_input(body.input)
    if body.previous_response_id is not None:
        messages = (*session.conversation(body.previous_response_id), *messages)
    if body.instructions is not None:
        if messages and messages[0].role == "system" and body.previous_response_id is not None:
            messages = messages[1:]  # instructions are those of one request, and replace the last one's
        messages = (Message("system", body.instructions), *messages)
    if not messages:
        raise GatewayError("input: at least one item is needed", param="input")
    tools = tuple(_chat_tool(index, tool) for index, tool in enumerate(body.tools or ()))
    check_tools(tools)
    wishes = {"temperature": body.temperature, "top_p": body.top_p}
    return ChatRequest(
        messages,
        tools,
        max_new_tokens=body.max_output_tokens,
        tool_choice=tool_choice_of(body.tool_choice, tools),
        one_call=body.parallel_tool_calls is False,
        wishes={name: value for name, value in wishes.items() if value is not None},
        json_schema=_json_schema((body.text or {}).get("format")),
        top_logprobs=body.top_logprobs or 0,
    )


def _chat_tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates and chat completions know it."""
    if tool.get("type") != "function":
        raise GatewayError(
            f"tools[{index}]: {tool.get('type')!r} is a tool of OpenAI's servers; only functions are supported",
            param=f"tools[{index}].type",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _json_schema(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    kind = form.get("type", "text") if isinstance(form, dict) else form
    if kind == "text" and isinstance(form, dict):
        return None
    if kind == "json_object":
        return {}
    if kind == "json_schema" and isinstance(form, dict) and isinstance(form.get("schema"), dict):
        return check_schema(form["schema"], "text.format")
    raise GatewayError(f"text.format: cannot give {kind!r}", param="text.format")


def _response(
    session: Session, body: _ResponseBody, asked: ChatRequest, reply: RecordedReply | None
) -> dict[str, Any]:
    """The response object; without a reply, as it stands when a stream begins."""
    cut = reply is not None and reply.finish_reason == "length"
    status = "in_progress" if reply is None else "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if reply is not None:
        output = output_items(reply, status=status)
        if _LOGPROBS in (body.include or ()):
            for item in output:
                if item["type"] == "message":
                    item["content"][0]["logprobs"] = token_logprobs(session, reply)
    return {
        "id": asked.interaction_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": output,
        "parallel_tool_calls": not asked.one_call,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": reply and _usage(reply),
    }


def _usage(reply: RecordedReply) -> dict[str, Any]:
    prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


async def _events(session: Session, body: _ResponseBody, asked: ChatRequest) -> AsyncGenerator[str, None]:
    """The events of a streamed response, in the order in which OpenAI sends them."""
    number = 0

    def send(kind: str, **fields: Any) -> str:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

    text_open = False
    index = 0  # of the output item
    message_id = f"msg_{asked.interaction_id}"
    try:
        async for part in session.stream(asked):
            if number == 0:
                begun = _response(session, body, asked, None)
                yield send("response.created", response=begun)
                yield send("response.in_progress", response=begun)
            if isinstance(part, RecordedReply):
                reply = part
            elif part.reasoning:
                for item in _reasoning_events(send, index, asked, part.text):
                    yield item
                index += 1
            else:
                if not text_open:
                    text_open = True
                    for item in _open_text(send, index, message_id):
                        yield item
                at = {"item_id": message_id, "output_index": index, "content_index": 0}
                yield send("response.output_text.delta", **at, delta=part.text, logprobs=[])
        final = _response(session, body, asked, reply)
        for item in final["output"][0 if index == 0 else 1 :]:
            if item["type"] == "message" and not text_open:
                for opening in _open_text(send, index, message_id):
                    yield opening
            for closing in _close(send, index, item):
                yield closing
            index += 1
        yield send("response.incomplete" if final["incomplete_details"] else "response.completed", response=final)
    except SparringError as error:
        if number == 0:
            raise
        detail = openai_error(error)[1]["error"]
        yield send("error", code=detail["code"], message=detail["message"], param=detail["param"])


def _open_text(send: Any, index: int, message_id: str) -> list[str]:
    item = {"type": "message", "id": message_id, "status": "in_progress", "role": "assistant", "content": []}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return [
        send("response.output_item.added", output_index=index, item=item),
        send("response.content_part.added", item_id=message_id, output_index=index, content_index=0, part=part),
    ]


def _close(send: Any, index: int, item: dict[str, Any]) -> list[str]:
    """What ends an item; a function call is short, and sent as a whole."""
    events = []
    if item["type"] == "message":
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        part = item["content"][0]
        events += [
            send("response.output_text.done", **at, text=part["text"], logprobs=part["logprobs"]),
            send("response.content_part.done", **at, part=part),
        ]
    else:
        at = {"item_id": item["id"], "output_index": index}
        opened = item | {"arguments": "", "status": "in_progress"}
        events += [
            send("response.output_item.added", output_index=index, item=opened),
            send("response.function_call_arguments.delta", **at, delta=item["arguments"]),
            send("response.function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"]),
        ]
    return [*events, send("response.output_item.done", output_index=index, item=item)]


def _reasoning_events(send: Any, index: int, asked: ChatRequest, text: str) -> list[str]:
    item = {"type": "reasoning", "id": f"rs_{asked.interaction_id}", "summary": [], "content": []}
    at = {"item_id": item["id"], "output_index": index, "content_index": 0}
    full = item | {"content": [{"type": "reasoning_text", "text": text}]}
    return [
        send("response.output_item.added", output_index=index, item=item),
        send("response.reasoning_text.delta", **at, delta=text),
        send("response.reasoning_text.done", **at, text=text),
        send("response.output_item.done", output_index=index, item=full),
    ]
