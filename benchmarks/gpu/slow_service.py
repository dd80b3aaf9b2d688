"""`benchmarks.gpu.slow_service:benchmarks/SlowService-v0`: a service behind the model that takes its time.

Whatever the model says is sent to the service, which waits for a real delay and answers; after a number of answers the
episode is over. Both numbers are long-tailed and drawn from what the model said, so members of a group differ in them.
The reward means nothing (it too is drawn): the workload is for measuring how rollouts and training go together.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

from gymnasium.envs.registration import register

from sparring.envs import ChatEnv
from sparring.envs.tasks import TaskRange
from sparring.errors import TaskError
from sparring.types import Message

__all__ = ["SlowService", "draw_delay", "draw_turns"]

MAX_TURNS = 20
MAX_DELAY_S = 3.0
_TURNS_MEDIAN, _TURNS_SPREAD = 3.0, 1.0
_DELAY_MEDIAN_S, _DELAY_SPREAD = 0.15, 1.0
_SIZES = {"train": 100_000, "test": 100}


def draw_turns(rng: random.Random) -> int:
    """1 to 20, lognormal around 3: most episodes are short, one in thirty is cut off at 20."""
    return min(MAX_TURNS, max(1, round(_TURNS_MEDIAN * math.exp(_TURNS_SPREAD * rng.gauss(0.0, 1.0)))))


def draw_delay(rng: random.Random) -> float:
    """Seconds, lognormal around 0.15, at most 3."""
    return min(MAX_DELAY_S, _DELAY_MEDIAN_S * math.exp(_DELAY_SPREAD * rng.gauss(0.0, 1.0)))


class SlowService(ChatEnv):
    """Args: scale: what delays are multiplied by; 0 for tests."""

    def __init__(self, *, scale: float = 1.0, max_turns: int = MAX_TURNS, **kwargs: Any) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        self._scale = scale
        self._rng = random.Random(0)
        self._wanted = 0

    def task_ids(self, split: str = "train") -> Sequence[str]:
        if split not in _SIZES:
            raise TaskError(f"SlowService has no split {split!r}; it has {', '.join(_SIZES)}")
        return TaskRange(split, _SIZES[split])

    async def _begin(self, task_id: str) -> Sequence[Message]:
        self._wanted = 0
        return [Message("user", f"Item {task_id}. Say one short line to the service.")]

    async def _submit(self, answer: str) -> str | None:
        if not self._wanted:
            self._rng = random.Random(f"slow service {self.task_id} {answer}")
            self._wanted = draw_turns(self._rng)
        await asyncio.sleep(self._scale * draw_delay(self._rng))
        if self.turns >= self._wanted:
            self.reward = self.reward_parts["drawn"] = self._rng.random()
            return None
        return "Next."


register("benchmarks/SlowService-v0", entry_point="benchmarks.gpu.slow_service:SlowService")
