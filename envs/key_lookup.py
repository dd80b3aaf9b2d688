"""`sparring/KeyLookup-v0`: ask a tool for the value of a key, then say it. So short that a model of 0.6M parameters,
trained from random weights over bytes, learns it in a minute: the environment of tests and benchmarks.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

from sparring.envs.core import ChatEnv
from sparring.envs.tasks import TaskRange
from sparring.envs.tools import ToolBox, ToolError
from sparring.envs.vector import ChatVectorEnv
from sparring.errors import ConfigError, TaskError
from sparring.types import Message, ToolCall

__all__ = ["KeyLookup", "make_vector"]

_SIZES = {"train": 100_000, "test": 1_000}


class KeyLookup(ChatEnv):
    """The prompt names a key of letters; `lookup` gives its value, digits; the answer is the value and nothing else.

    Reward, in total: 1 for the value after it was looked up, 0.4 for looking up the right key alone.

    Args:
        length: characters of the key, and of its value.
        careless: share of the demonstrations whose answer is not the value alone, and so scores 0.4: a model that has
            imitated them has something to unlearn.
    """

    def __init__(self, *, length: int = 3, careless: float = 0.0, max_turns: int = 3, **kwargs: Any) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        if length < 1:
            raise ConfigError(f"length must be at least 1, got {length}")
        if not 0 <= careless <= 1:
            raise ConfigError(f"careless is a share between 0 and 1, got {careless}")
        self.length, self.careless = length, careless
        self.toolbox = ToolBox([self.lookup])
        self._key = self._value = self._demonstrated = ""

    def task_ids(self, split: str = "train") -> Sequence[str]:
        if split not in _SIZES:
            raise TaskError(f"KeyLookup has no split {split!r}; it has {', '.join(_SIZES)}")
        return TaskRange(split, _SIZES[split])

    async def _begin(self, task_id: str) -> Sequence[Message]:
        rng = random.Random(f"key lookup {self.length} {task_id}")
        self._key = "".join(rng.choices(string.ascii_lowercase, k=self.length))
        self._value = "".join(rng.choices(string.digits, k=self.length))
        self._demonstrated = f"It is {self._value}" if rng.random() < self.careless else self._value
        self.reward_parts = {"exact": 0.0, "right_call": 0.0}
        return [Message("user", f"Look up {self._key}")]

    async def lookup(self, key: str) -> str:
        """Give the value of a key."""
        if key != self._key:
            raise ToolError("no such key")
        self.reward_parts["right_call"] = 1.0
        self.reward = max(self.reward, 0.4)
        return self._value

    async def _submit(self, answer: str) -> None:
        if self.reward_parts["right_call"] and answer == self._value:
            self.reward = self.reward_parts["exact"] = 1.0

    def demonstration(self) -> list[Message]:
        return [
            Message("assistant", tool_calls=(ToolCall("call_0", "lookup", json.dumps({"key": self._key})),)),
            Message("tool", self._value, tool_call_id="call_0", name="lookup"),
            Message("assistant", self._demonstrated),
        ]


make_vector = partial(ChatVectorEnv, KeyLookup)
