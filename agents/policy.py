"""What plays an episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sparring.envs import ChatEnv
from sparring.types import ChatClient, Failure, StopReason

__all__ = ["Outcome", "Policy"]


@dataclass(frozen=True)
class Outcome:
    """How a policy ended its play. The reward is the environment's.

    Attributes:
        answer: what the agent handed in, for display.
    """

    stop_reason: StopReason
    answer: str | None = None
    failure: Failure | None = None


class Policy(Protocol):
    """Plays episodes, one or many at a time: state of an episode belongs into `play`.

    A policy may have a method `check_start()`, too, which raises ConfigError where it knows before the first episode
    that it cannot play: it is called before anything is prepared.
    """

    async def play(self, env: ChatEnv, client: ChatClient) -> Outcome:
        """Play one episode of an environment that has been reset, to its end.

        Raises:
            BudgetExhausted: a budget of the session ran out; the runner truncates the episode.
            SparringError: a failure of the infrastructure.
        """
        ...
