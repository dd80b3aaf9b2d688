"""The native loop: ask the model, step the environment, until the environment says that the episode is over."""

from __future__ import annotations

from sparring.agents.policy import Outcome
from sparring.envs import ChatEnv
from sparring.errors import BudgetExhausted
from sparring.types import ChatClient, Message, StopReason

__all__ = ["NativePolicy"]


class NativePolicy:
    """Prompts with the environment's messages and tools, and nothing else."""

    async def play(self, env: ChatEnv, client: ChatClient) -> Outcome:
        answer: str | None = None
        while not env.done:
            try:
                reply = await client.chat(env.messages, env.tools)
            except BudgetExhausted as error:
                env.truncate(StopReason(error.stop_reason))
                break
            answer = reply.message.content
            await env.astep(_action(reply.message, reply.text))
        return Outcome(env.stop_reason or StopReason.ABORTED, answer, env.failure)


def _action(message: Message, text: str) -> Message | str:
    """The message where its calls were parsed, else the raw text, so that the environment says what was malformed."""
    return message if message.tool_calls else text
