"""Demonstrations as token sequences: gold continuations, played through the gateway like any episode."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.agents.native import NativePolicy
from sparring.agents.runner import make_env
from sparring.backend.engines.base import SamplingParams
from sparring.backend.gateway import ChatFormat
from sparring.config import EnvPart, RunConfig
from sparring.errors import ConfigError, TaskError
from sparring.replay import replaying
from sparring.types import TokenSequence

__all__ = ["record_demonstrations"]


async def record_demonstrations(
    config: RunConfig, chat: ChatFormat, part: EnvPart, task_ids: Sequence[str], seed: int
) -> list[TokenSequence]:
    """Play each task's demonstration; the recorder then holds it exactly as it would hold a sampled episode.

    Raises:
        ConfigError: the environment has no demonstrations.
        TaskError: a demonstration does not earn the full reward, and so teaches something wrong.
    """
    env = make_env(part.id, part.kwargs)
    sequences: list[TokenSequence] = []
    try:
        for task_id in task_ids:
            await env.areset(seed=seed, options={"task_id": task_id})
            demonstration = env.demonstration()
            if demonstration is None:
                raise ConfigError(f"warm_start.steps: {part.id} has no demonstrations; set it to 0")
            history, replies = list(env.messages), []
            for message in demonstration:
                if message.role == "assistant":
                    replies.append(chat.encode_reply(history, message, env.tools))
                history.append(message)
            async with replaying(replies, chat, SamplingParams(), max_length=config.model.max_length) as recorder:
                session = recorder.open_session(
                    task_id, turn_budget=len(replies), token_budget=sum(map(len, replies)) + len(replies)
                )
                await NativePolicy().play(env, session)
                record = recorder.close_session(task_id)
            if env.reward <= 0:
                raise TaskError(f"the demonstration of {task_id} in {part.id} earns {env.reward}: nothing to imitate")
            sequences.extend(record.sequences)
    finally:
        await env.aclose()
    return sequences
