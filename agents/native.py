"""The native loop: ask the model, step the environment, until the environment says that the episode is over."""

from __future__ import annotations

from sparring.agents.policy import Outcome
from sparring.envs import ChatEnv
from sparring.errors import BudgetExhausted
from sparring.types import ChatClient, StopReason

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
            # A malformed call is still text in the message: the environment's own parser says what is wrong with it.
            await env.astep(reply.message)
        return Outcome(env.stop_reason or StopReason.ABORTED, answer, env.failure)
