"""`POST /v1/messages`: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from sparring.backend.gateway.http.addressed import addressed
from sparring.backend.gateway.http.body import MAX_TOP_K, Body, read_body
from sparring.backend.gateway.http.errors import anthropic_error
from sparring.backend.gateway.http.message_blocks import content_blocks, read_conversation
from sparring.backend.gateway.http.openai_messages import stop_strings
from sparring.backend.gateway.http.streams import event, event_stream, unless_disconnected
from sparring.backend.gateway.request import ChatRequest, RecordedReply
from sparring.backend.gateway.schemas import check_tools
from sparring.backend.gateway.session import Session
from sparring.errors import GatewayError, SparringError

__all__ = ["messages"]


class _MessagesBody(Body):
    model: str
    max_tokens: int = Field(ge=1)
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_TOP_K)
    stop_sequences: list[str] | None = None
    stream: bool | None = None


async def messages(request: Request, session: Session) -> Response:
    body = await read_body(request, _MessagesBody)
    asked = addressed(_read(body), request, session, body.model)
    if body.stream:
        return await event_stream(request, _events(session, body, asked))
    reply = await unless_disconnected(request, session.reply(asked))
    return JSONResponse(_message(body, asked, reply))


def _read(body: _MessagesBody) -> ChatRequest:
    tools = tuple(_chat_tool(index, tool) for index, tool in enumerate(body.tools or ()))
    check_tools(tools)
    wishes = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    return ChatRequest(
        read_conversation(body.system, body.messages),
        tools,
        max_new_tokens=body.max_tokens,
        stop=stop_strings(body.stop_sequences, "stop_sequences"),
        tool_choice=_tool_choice(body.tool_choice, {tool["function"]["name"] for tool in tools}),
        one_call=bool((body.tool_choice or {}).get("disable_parallel_tool_use")),
        wishes={name: value for name, value in wishes.items() if value is not None},
    )


def _chat_tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates know it."""
    if tool.get("type") not in (None, "custom"):
        raise GatewayError(
            f"tools[{index}]: {tool['type']!r} is a tool of Anthropic's servers; only custom tools are supported",
            param=f"tools[{index}].type",
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema", {})}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any] | None, names: set[str]) -> str:
    kind = (choice or {}).get("type", "auto")
    if kind in ("auto", "none"):
        return kind
    if kind == "any":
        return "required"
    name = (choice or {}).get("name")
    if kind == "tool" and isinstance(name, str) and name in names:
        return name
    raise GatewayError(f"tool_choice: {json.dumps(choice)} names no tool of this request", param="tool_choice")


def _message(body: _MessagesBody, asked: ChatRequest, reply: RecordedReply | None) -> dict[str, Any]:
    """The message object; without a reply, as it stands when a stream begins."""
    return {
        "id": asked.interaction_id,
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": content_blocks(reply.message) if reply else [],
        **_ending(reply),
        "usage": _usage(reply),
    }


def _ending(reply: RecordedReply | None) -> dict[str, Any]:
    if reply is None:
        return {"stop_reason": None, "stop_sequence": None}
    reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
    reason = "stop_sequence" if reply.stop_string is not None else reasons[reply.finish_reason]
    return {"stop_reason": reason, "stop_sequence": reply.stop_string}


def _usage(reply: RecordedReply | None) -> dict[str, int]:
    return {
        "input_tokens": reply.usage.prompt_tokens if reply else 0,
        "output_tokens": reply.usage.completion_tokens if reply else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


async def _events(session: Session, body: _MessagesBody, asked: ChatRequest) -> AsyncGenerator[str, None]:
    """The events of a streamed message, in the order in which Anthropic sends them."""

    def send(kind: str, **fields: Any) -> str:
        return event({"type": kind, **fields}, kind)

    begun = text_open = False
    index = 0
    reply: RecordedReply | None = None
    try:
        async for part in session.stream(asked):
            if not begun:
                begun = True
                yield send("message_start", message=_message(body, asked, None))
            if isinstance(part, RecordedReply):
                reply = part
            elif part.reasoning:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                yield send("content_block_start", index=index, content_block=block)
                delta = {"type": "thinking_delta", "thinking": part.text}
                yield send("content_block_delta", index=index, delta=delta)
                yield send("content_block_stop", index=index)
                index += 1
            else:
                if not text_open:
                    text_open = True
                    yield send("content_block_start", index=index, content_block={"type": "text", "text": ""})
                yield send("content_block_delta", index=index, delta={"type": "text_delta", "text": part.text})
        if text_open:
            yield send("content_block_stop", index=index)
            index += 1
        for call in reply.message.tool_calls if reply else ():
            use = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield send("content_block_start", index=index, content_block=use)
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            yield send("content_block_delta", index=index, delta=delta)
            yield send("content_block_stop", index=index)
            index += 1
        yield send("message_delta", delta=_ending(reply), usage=_usage(reply))
        yield send("message_stop")
    except SparringError as error:
        if not begun:
            raise
        yield event(anthropic_error(error)[1], "error")
