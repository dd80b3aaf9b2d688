"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from sparring.backend.gateway.http.addressed import addressed
from sparring.backend.gateway.http.body import MAX_TOP_K, Body, read_body
from sparring.backend.gateway.http.errors import openai_error
from sparring.backend.gateway.http.logprobs import token_logprobs
from sparring.backend.gateway.http.openai_messages import read_messages, stop_strings, tool_choice_of
from sparring.backend.gateway.http.streams import event, event_stream, merged, unless_disconnected
from sparring.backend.gateway.request import ChatRequest, RecordedReply, TextDelta
from sparring.backend.gateway.schemas import check_schema, check_tools
from sparring.backend.gateway.served import POLICY
from sparring.backend.gateway.session import Session
from sparring.errors import GatewayError, SparringError, first_error

__all__ = ["chat_completions"]

# Other forms of an answer than the text and the tool calls that are given here.
_UNMET = ("functions", "function_call", "audio")


class _ChatBody(Body):
    model: str = POLICY
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_TOP_K)
    min_p: float | None = Field(None, ge=0, lt=1)
    seed: int | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


async def chat_completions(request: Request, session: Session) -> Response:
    body = await read_body(request, _ChatBody)
    asked = _read(body)
    asks = [addressed(asked, request, session, body.model) for _ in range(body.n or 1)]
    if body.stream:
        return await event_stream(request, _events(session, body, asks))
    replies = await unless_disconnected(request, _all(session, asks))
    choices = [_choice(session, index, reply, body.logprobs) for index, reply in enumerate(replies)]
    return JSONResponse(
        {
            "id": replies[0].interaction_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "choices": choices,
            "usage": _usage(replies),
        }
    )


def _read(body: _ChatBody) -> ChatRequest:
    for name in _UNMET:
        if (body.model_extra or {}).get(name) is not None:
            raise GatewayError(f"{name} is not supported: use tools and text", param=name)
    if body.modalities and body.modalities != ["text"]:
        raise GatewayError("modalities: text is the one that is supported", param="modalities")
    if body.top_logprobs and not body.logprobs:
        raise GatewayError("top_logprobs needs logprobs to be true", param="top_logprobs")
    tools = tuple(body.tools or ())
    check_tools(tools)
    wishes = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    return ChatRequest(
        read_messages(body.messages),
        tools,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        stop=stop_strings(body.stop, "stop"),
        tool_choice=tool_choice_of(body.tool_choice, tools),
        one_call=body.parallel_tool_calls is False,
        wishes={name: value for name, value in wishes.items() if value is not None},
        foreign=tuple(
            name for name in ("frequency_penalty", "presence_penalty", "logit_bias") if getattr(body, name)
        ),
        json_schema=_json_schema(body.response_format),
        top_logprobs=body.top_logprobs or 0,
    )


def _json_schema(form: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = form.get("type") if form else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    schema = (form or {}).get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return check_schema(schema["schema"], "response_format")
    raise GatewayError(f"response_format: cannot give {kind!r}", param="response_format")


async def _all(session: Session, asks: Sequence[ChatRequest]) -> list[RecordedReply]:
    if len(asks) == 1:
        return [await session.reply(asks[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(session.reply(asked)) for asked in asks]
    except ExceptionGroup as errors:
        raise first_error(errors) from None  # the others were cancelled, or failed of the same
    return [task.result() for task in tasks]


async def _events(session: Session, body: _ChatBody, asks: Sequence[ChatRequest]) -> AsyncGenerator[str, None]:
    created = int(time.time())
    begun: set[int] = set()
    replies: list[RecordedReply] = []
    with_usage = bool((body.stream_options or {}).get("include_usage"))

    def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        data = {
            "id": asks[0].interaction_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": body.model,
            "choices": choices,
        }
        return event(data | ({"usage": usage} if with_usage else {}))

    try:
        async for index, part in merged([session.stream(asked) for asked in asks]):
            if index not in begun:
                begun.add(index)
                yield chunk([_delta(index, {"role": "assistant", "content": ""})])
            if isinstance(part, TextDelta):
                yield chunk([_delta(index, {"reasoning_content" if part.reasoning else "content": part.text})])
                continue
            replies.append(part)
            for number, call in enumerate(part.message.tool_calls):
                yield chunk([_delta(index, {"tool_calls": [{"index": number, **call.to_openai()}]})])
            last = _delta(index, {}, part.finish_reason)
            if body.logprobs:
                last["logprobs"] = {"content": token_logprobs(session, part), "refusal": None}
            yield chunk([last | {"interaction_id": part.interaction_id}])
        if with_usage:
            yield chunk([], _usage(replies))
        yield "data: [DONE]\n\n"
    except SparringError as error:
        if not begun:
            raise
        yield event(openai_error(error)[1])


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}


def _choice(session: Session, index: int, reply: RecordedReply, logprobs: bool | None) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"refusal": None, **reply.message.to_openai()},
        "finish_reason": reply.finish_reason,
        "logprobs": {"content": token_logprobs(session, reply), "refusal": None} if logprobs else None,
        "interaction_id": reply.interaction_id,
    }


def _usage(replies: Sequence[RecordedReply]) -> dict[str, Any]:
    completion = sum(reply.usage.completion_tokens for reply in replies)
    prompt = replies[0].usage.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
