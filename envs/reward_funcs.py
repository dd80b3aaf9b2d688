"""Reward functions in TRL's form: `f(prompts, completions, **columns) -> list[float | None]`, sync or async."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.errors import ConfigError, TaskError, described
from sparring.plugins import load_attribute
from sparring.threads import in_daemon_thread

__all__ = ["RewardFunc", "RewardFuncs"]

RewardFunc = Callable[..., Any]

# What TRL passes besides the columns and an environment does not have: it sees text, and no trainer.
_NOT_HERE = ("completion_ids", "trainer_state", "environments")


class RewardFuncs:
    """Scores one completion at a time by the weighted sum of several functions.

    Args:
        functions: callables, or 'file.py:function' / 'module:function'.
        weights: one for each; None: 1.
        timeout_s: what all of them together may take.

    Attributes:
        names: of the functions, as parts of the reward.

    Raises:
        ConfigError: no function, another number of weights, one that cannot be called, or one that needs what an
            environment does not have.
    """

    def __init__(
        self, functions: Sequence[RewardFunc | str], weights: Sequence[float] | None = None, *, timeout_s: float = 60.0
    ) -> None:
        if not functions:
            raise ConfigError("reward_funcs: at least one reward function is needed")
        self._functions = [_load(f) if isinstance(f, str) else f for f in functions]
        self._weights = [1.0] * len(functions) if weights is None else [float(w) for w in weights]
        if len(self._weights) != len(functions):
            raise ConfigError(f"reward_weights: {len(self._weights)} of them for {len(functions)} reward_funcs")
        self._timeout_s = timeout_s
        self.names: list[str] = []
        for function in self._functions:
            name = _check(function)
            self.names.append(name if name not in self.names else f"{name}_{len(self.names)}")

    async def score(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """The reward and its parts: a part for each function that gave one, and what they logged by `log_metric`.

        A function that returns None has nothing to say and is left out, as in TRL.

        Raises:
            TaskError: one raises, takes too long, gives no single finite number; or none gives any.
        """
        logged: dict[str, float] = {}
        given = {
            "prompts": [prompt],
            "completions": [completion],
            **{name: [value] for name, value in columns.items()},
            "log_metric": lambda name, value: logged.__setitem__(name, float(value)),
            "log_extra": lambda column, values: None,
        }
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(self._call(i, given)) for i in range(len(self._functions))]
        except TimeoutError:
            raise TaskError(f"the reward functions {', '.join(self.names)} took over {self._timeout_s:g} s") from None
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # `_call` says which function it was, and what that raised
        outputs = {name: call.result() for name, call in zip(self.names, calls, strict=True)}
        scores = {name: score for name, score in outputs.items() if score is not None}
        if not scores:
            raise TaskError(f"every reward function ({', '.join(self.names)}) returned None: nothing scores this task")
        weights = dict(zip(self.names, self._weights, strict=True))
        return sum(weights[name] * score for name, score in scores.items()), {**logged, **scores}

    async def _call(self, index: int, given: Mapping[str, Any]) -> float | None:
        function, name = self._functions[index], self.names[index]
        try:
            arguments = _accepted(function, given)
            if _is_async(function):
                output = await function(**arguments)
            else:
                output = await in_daemon_thread(functools.partial(function, **arguments), "sparring-reward")
        except Exception as error:  # whatever the user's code raises
            raise TaskError(f"the reward function {name} raised {described(error)}") from error
        try:
            (score,) = output
            number = None if score is None else float(score)
        except (TypeError, ValueError):
            raise TaskError(
                f"the reward function {name} returned {str(output)[:80]!r} for one completion: "
                "a list with one number, or None, is wanted"
            ) from None
        if number is not None and not math.isfinite(number):
            raise TaskError(f"the reward function {name} returned {number}, which is no finite number")
        return number


def _load(spec: str) -> RewardFunc:
    source = Path(spec.rpartition(":")[0])
    return _load_once(spec, source.stat().st_mtime_ns if source.is_file() else 0)


@functools.cache
def _load_once(spec: str, _modified_ns: int) -> RewardFunc:
    """Environments are made once an episode: the user's file runs once, and again when it changes."""
    return load_attribute(spec, "reward_funcs")


def _check(function: RewardFunc) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function) or hasattr(function, "forward"):
        raise ConfigError(f"reward_funcs: {name} is no function; wrap a reward model in one that returns its scores")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in _NOT_HERE and parameter.default is parameter.empty:
            raise ConfigError(
                f"reward_funcs: {name} needs {parameter.name!r}, which an environment does not have: it sees text alone"
            )
    return name


def _accepted(function: RewardFunc, given: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _is_async(function: RewardFunc) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
