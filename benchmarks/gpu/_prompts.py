"""GSM8K problems as the environment asks them, encoded for a model."""

from __future__ import annotations

from pathlib import Path

from sparring.backend.gateway import ChatFormat
from sparring.types import Message


def messages(split: str, n: int) -> list[list[Message]]:
    import asyncio

    from sparring.envs.gsm8k import GSM8K

    async def ask() -> list[list[Message]]:
        env = GSM8K()
        found = []
        for task in list(env.task_ids(split))[:n]:
            await env.areset(seed=0, options={"task_id": task})
            found.append(list(env.messages))
        await env.aclose()
        return found

    return asyncio.run(ask())


def encoded(model: Path, chats: list[list[Message]]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [message.to_openai() for message in chat], add_generation_prompt=True, return_dict=False
        )
        for chat in chats
    ]


def chat_format(model: Path) -> ChatFormat:
    return ChatFormat.load(model, tool_template=None, tool_format="hermes")
