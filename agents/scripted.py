"""A policy without a model, for tests of environments, runners and adapters."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.agents.policy import Outcome
from sparring.envs import ChatEnv
from sparring.errors import AgentError
from sparring.types import ChatClient, Message, StopReason

__all__ = ["ScriptedPolicy"]


class ScriptedPolicy:
    """Plays given actions in order, or the environment's own demonstration where none are given. Asks no model."""

    def __init__(self, actions: Sequence[str | Message] | None = None) -> None:
        self._actions = actions

    async def play(self, env: ChatEnv, client: ChatClient) -> Outcome:
        actions = self._actions
        if actions is None:
            actions = [message for message in env.demonstration() or () if message.role == "assistant"]
        action: str | Message | None = None
        for action in actions:
            if env.done:
                break
            await env.astep(action)
        if not env.done:
            raise AgentError(f"the script of {len(actions)} actions ended before the episode of task {env.task_id}")
        answer = action.content if isinstance(action, Message) else action
        return Outcome(env.stop_reason or StopReason.FINISHED, answer, env.failure)
