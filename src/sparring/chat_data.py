"""Conversations in a JSONL file as token sequences, for warm start: encoded as the recorder holds sampled ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparring.backend.engines.base import SamplingParams
from sparring.backend.gateway import ChatFormat
from sparring.backend.gateway.http.openai_messages import read_messages
from sparring.errors import ConfigError, GatewayError, TaskError
from sparring.replay import replaying
from sparring.types import TokenSequence, Turn

__all__ = ["read_sequences"]


async def read_sequences(path: Path, chat: ChatFormat, *, max_length: int) -> list[TokenSequence]:
    """The sequences of a file as `sparring export` writes it. What the assistant said in them is what is trained.

    A row has `messages` and perhaps `tools` in OpenAI's format, or the arrays of a `TokenSequence`. Rows longer than
    `max_length` tokens are left out.

    Raises:
        ConfigError: no such file.
        TaskError: a row that is neither, with its line; or none that fits.
    """
    sequences: list[TokenSequence] = []
    for where, row in _rows(path):
        try:
            new = [_from_arrays(row)] if "token_ids" in row else await _record(row, chat)
        except (GatewayError, KeyError, TypeError, ValueError) as error:
            raise TaskError(f"warm_start.data: {where} cannot be read: {error!r}") from error
        if max(map(len, new)) <= max_length:
            sequences.extend(new)
    if not sequences:
        raise TaskError(f"warm_start.data: {path} holds no conversation within model.max_length={max_length} tokens")
    return sequences


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold U+2028 as it is
    except OSError as error:
        raise ConfigError(f"warm_start.data: cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise TaskError(f"warm_start.data: {where} is not JSON: {error}") from error
        if row is not None and not (isinstance(row, dict) and ("messages" in row or "token_ids" in row)):
            raise TaskError(f"warm_start.data: {where} has neither 'messages' nor 'token_ids'")
        if row is not None:
            yield where, row


def _from_arrays(row: dict[str, Any]) -> TokenSequence:
    arrays = {name: row[name] for name in ("token_ids", "action_mask", "behaviour_logprobs", "policy_versions")}
    return TokenSequence(**arrays, turns=tuple(Turn(**turn) for turn in row["turns"]))


async def _record(row: dict[str, Any], chat: ChatFormat) -> Sequence[TokenSequence]:
    """Have the recorder record each assistant message, as if a model had just said it."""
    messages, tools = read_messages(row["messages"]), row.get("tools") or ()
    spoken = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not spoken:
        raise ValueError("no message is the assistant's")
    replies = [chat.encode_reply(messages[:index], messages[index], tools) for index in spoken]
    longest = 1 << 30
    async with replaying(replies, chat, SamplingParams(max_new_tokens=longest), max_length=longest) as recorder:
        session = recorder.open_session("row", turn_budget=len(spoken), token_budget=longest)
        for index in spoken:
            await session.chat(messages[:index], tools)
        return recorder.close_session("row").sequences
