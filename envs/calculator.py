"""`sparring/Calculator-v0`: generated arithmetic word problems, solved with a calculator in two turns or more."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from sparring.envs.arithmetic import evaluate, format_number
from sparring.envs.core import ChatEnv
from sparring.envs.tasks import TaskRange
from sparring.envs.tools import ToolBox
from sparring.envs.vector import ChatVectorEnv
from sparring.errors import ConfigError, TaskError
from sparring.types import Message, ToolCall

__all__ = ["Calculator", "make_vector"]

_SYSTEM = "You solve problems with a calculator. First call it, then give the answer."
_EXAMPLE = (
    Message("user", "Mia has 14 cups and buys 9 more. How many cups does Mia have?"),
    Message("assistant", tool_calls=(ToolCall("example", "calculator", '{"expression": "14 + 9"}'),)),
    Message("tool", "23", tool_call_id="example", name="calculator"),
    Message("assistant", "Answer: 23"),
)
_NAMES = ("Tom", "Ana", "Liu", "Omar", "Eva", "Raj")
_THINGS = ("apples", "coins", "books", "pens", "stamps", "shells")
_SIZES = {"train": 100_000, "test": 1_000}
_ANSWER = re.compile(r"Answer:\s*(-?\d{1,40}(?:\.\d{1,40})?)", re.ASCII)  # Python refuses integers of 4,300 digits

_VALID_CALL, _RIGHT_CALL, _EXACT = 0.1, 0.4, 1.0


@dataclass(frozen=True)
class _Problem:
    question: str
    expression: str
    answer: int


class Calculator(ChatEnv):
    """Word problems of one step (`level=1`), two or three steps, in the same phrasing.

    Reward, in total: 1 for the right answer after a call that gave its value, 0.4 for that call alone, 0.1 for any
    valid call. `reward_parts["exact"]` is 1 where the total is 1, else 0.
    """

    def __init__(self, *, level: int = 1, max_turns: int = 4, **kwargs: Any) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        if level not in _MAKERS:
            raise ConfigError(f"Calculator has levels {', '.join(map(str, _MAKERS))}, not {level!r}")
        self.level = level
        self.toolbox = ToolBox([self.calculator])
        self._problem_now = _Problem("", "0", 0)

    def task_ids(self, split: str = "train") -> Sequence[str]:
        if split not in _SIZES:
            raise TaskError(f"Calculator has no split {split!r}; it has {', '.join(_SIZES)}")
        return TaskRange(split, _SIZES[split])

    async def _begin(self, task_id: str) -> Sequence[Message]:
        self._problem_now = _MAKERS[self.level](random.Random(f"calculator {self.level} {task_id}"))
        self.reward_parts = {"exact": 0.0, "right_call": 0.0, "valid_call": 0.0}
        return [Message("system", _SYSTEM), *_EXAMPLE, Message("user", self._problem_now.question)]

    async def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: numbers, + - * / and parentheses, such as (3 + 4) * 2
        """
        value = evaluate(expression)
        self._earn("valid_call", _VALID_CALL)
        if value == self._problem_now.answer:
            self._earn("right_call", _RIGHT_CALL)
        return format_number(value)

    async def _submit(self, answer: str) -> None:
        match = _ANSWER.search(answer)
        if match and self.reward_parts["right_call"] and Fraction(match[1]) == self._problem_now.answer:
            self._earn("exact", _EXACT)

    def _earn(self, part: str, total: float) -> None:
        self.reward_parts[part] = 1.0
        self.reward = max(self.reward, total)

    def demonstration(self) -> list[Message]:
        problem = self._problem_now
        call = ToolCall("call_0", "calculator", json.dumps({"expression": problem.expression}))
        return [
            Message("assistant", tool_calls=(call,)),
            Message("tool", str(problem.answer), tool_call_id="call_0", name="calculator"),
            Message("assistant", f"Answer: {problem.answer}"),
        ]


make_vector = partial(ChatVectorEnv, Calculator)


def _one_step(rng: random.Random) -> _Problem:
    kind = rng.randrange(4)
    a, b = rng.randint(11, 99), rng.randint(2, 30)
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    if kind == 0:
        question = f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have?"
        return _Problem(question, f"{a} + {b}", a + b)
    if kind == 1:
        b = min(a, b)
        question = f"{name} has {a} {things} and gives away {b}. How many {things} are left?"
        return _Problem(question, f"{a} - {b}", a - b)
    if kind == 2:
        question = f"{name} has {b} boxes with {a} {things} in each. How many {things} is that?"
        return _Problem(question, f"{b} * {a}", a * b)
    question = f"{name} shares {a * b} {things} equally among {b} friends. How many {things} does each get?"
    return _Problem(question, f"{a * b} / {b}", a)


def _more_steps(steps: int, rng: random.Random) -> _Problem:
    """Boxes of things, then a gift or a purchase, then (three steps) sharing among friends."""
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, each, change = rng.randint(2, 30), rng.randint(11, 99), rng.randint(2, 20)
    sign, verb = rng.choice((("+", "buys {} more"), ("-", "gives away {}")))
    total = boxes * each + (change if sign == "+" else -change)
    friends = rng.randint(2, 9)
    if steps == 3:  # round the change up until the friends can share, so that every answer is an integer
        rest = total % friends if sign == "-" else -total % friends
        change += rest
        total += -rest if sign == "-" else rest
    story = f"{name} has {boxes} boxes with {each} {things} in each and {verb.format(change)}."
    expression = f"{boxes} * {each} {sign} {change}"
    if steps == 2:
        return _Problem(f"{story} How many {things} does {name} have now?", expression, total)
    sharing = f"Then {name} shares all of them equally among {friends} friends. How many {things} does each get?"
    return _Problem(f"{story} {sharing}", f"({expression}) / {friends}", total // friends)


_MAKERS: dict[int, Callable[[random.Random], _Problem]] = {
    1: _one_step,
    2: partial(_more_steps, 2),
    3: partial(_more_steps, 3),
}
