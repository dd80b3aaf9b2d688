"""Many episodes at once: Gymnasium's vector face, and `send`/`recv` for episodes of very different lengths."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from sparring.envs.core import ChatEnv
from sparring.envs.loop import can_wait, spawn
from sparring.errors import ConfigError
from sparring.types import Message

__all__ = ["ChatVectorEnv", "Transition"]


@dataclass(frozen=True)
class Transition:
    """What one sub-environment returned. After the end of an episode it is reset at once, as with Gymnasium's
    SAME_STEP: the observation is then the next episode's, and `info` has `final_obs` and `final_info`.
    """

    env_index: int
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class ChatVectorEnv(VectorEnv[tuple[str, ...], Sequence[str | Message], np.ndarray]):
    """Copies of one environment that step independently, as tasks of the private event loop.

    `step` waits for all, as Gymnasium's vector environments do. `send` starts steps and returns, `recv` gives whatever
    is ready, so that a fast episode never waits for a slow one.
    """

    def __init__(
        self, env_class: type[ChatEnv], *, num_envs: int = 1, render_mode: str | None = None, **kwargs: Any
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1, got {num_envs}")
        self.envs = [env_class(render_mode=render_mode, **kwargs) for _ in range(num_envs)]
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.metadata = {**self.envs[0].metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._locks = [asyncio.Lock() for _ in self._range]  # a step that was given up may still be unwinding
        self._pending: dict[int, Future[Transition]] = {}
        self._ready: queue.SimpleQueue[tuple[int, Future[Transition]]] = queue.SimpleQueue()

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Reset all; steps in flight are given up. An integer seed gives sub-environment i the seed `seed + i`."""
        self._give_up_steps()
        seeds = [None if seed is None else seed + i for i in self._range] if not isinstance(seed, Sequence) else seed
        if len(seeds) != self.num_envs:
            raise ConfigError(f"{len(seeds)} seeds for {self.num_envs} sub-environments")
        resets = [spawn(self._reset(index, seeds[index], options)) for index in self._range]
        wait(resets)
        observations, infos = zip(*(done.result() for done in resets), strict=True)
        return tuple(observations), self._joined_infos(enumerate(infos))

    def send(self, actions: Mapping[int, str | Message] | Sequence[str | Message]) -> None:
        """Start a step in each sub-environment that has an action: a mapping by index, or a sequence for all.

        Raises:
            ValueError: no such sub-environment, or its last step has not been received.
        """
        chosen = actions if isinstance(actions, Mapping) else dict(zip(self._range, actions, strict=True))
        for index in chosen:
            if index not in self._range:
                raise ValueError(f"there is no sub-environment {index}; there are {self.num_envs}")
            if index in self._pending:
                raise ValueError(f"sub-environment {index} is still stepping: receive that step first")
        for index, action in chosen.items():
            step = self._pending[index] = spawn(self._step(index, action))
            step.add_done_callback(partial(self._note_ready, index))

    def recv(self, at_least: int = 1, *, timeout_s: float | None = None) -> list[Transition]:
        """What is ready, in order of completion, after waiting for `at_least` steps.

        Raises:
            ValueError: fewer steps than `at_least` are in flight.
            TimeoutError: `timeout_s` passed; the steps stay in flight, and those that were ready are kept.
            Exception: whatever a sub-environment's step raised, with its index noted. The other steps stay receivable.
        """
        if at_least > len(self._pending):
            raise ValueError(f"waiting for {at_least} steps, but {len(self._pending)} are in flight: send first")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        received: list[tuple[int, Future[Transition]]] = []
        while len(received) < at_least or not self._ready.empty():
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                index, step = self._ready.get(timeout=left)
            except queue.Empty:
                for item in received:
                    self._ready.put(item)
                raise TimeoutError(f"{len(received)} of {at_least} steps were ready after {timeout_s:g} s") from None
            if self._pending.get(index) is step:  # else given up by a reset
                received.append((index, step))
        failed = next((item for item in received if item[1].exception() is not None), None)
        if failed is not None:
            for item in received:
                if item is not failed:
                    self._ready.put(item)
            received = [failed]
        for index, _ in received:
            del self._pending[index]
        return [_result(index, step) for index, step in received]

    def step(
        self, actions: Sequence[str | Message]
    ) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all and wait for all. Observations are a tuple of str, the rest arrays of length `num_envs`."""
        if self._pending:
            raise ValueError(f"{len(self._pending)} steps that were sent have not been received")
        self.send(actions)
        transitions = sorted(self.recv(self.num_envs), key=lambda transition: transition.env_index)
        return (
            tuple(transition.observation for transition in transitions),
            np.array([transition.reward for transition in transitions], dtype=np.float64),
            np.array([transition.terminated for transition in transitions], dtype=np.bool_),
            np.array([transition.truncated for transition in transitions], dtype=np.bool_),
            self._joined_infos((transition.env_index, transition.info) for transition in transitions),
        )

    def render(self) -> tuple[str | None, ...]:  # type: ignore[override]
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        self._give_up_steps()
        closing = [spawn(env.aclose()) for env in self.envs]
        if can_wait():  # Gymnasium closes on collection too, which may happen anywhere
            wait(closing)

    async def _reset(
        self, index: int, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[str, dict[str, Any]]:
        async with self._locks[index]:
            return await self.envs[index].areset(seed=seed, options=options)

    async def _step(self, index: int, action: str | Message) -> Transition:
        env = self.envs[index]
        async with self._locks[index]:
            observation, reward, terminated, truncated, info = await env.astep(action)
            if terminated or truncated:
                final = {"final_obs": observation, "final_info": info}
                observation, info = await env.areset()
                info |= final
        return Transition(index, observation, reward, terminated, truncated, info)

    def _note_ready(self, index: int, step: Future[Transition]) -> None:
        self._ready.put((index, step))

    @property
    def _range(self) -> range:
        return range(self.num_envs)

    def _give_up_steps(self) -> None:
        for step in self._pending.values():
            step.cancel()
        self._pending.clear()

    def _joined_infos(self, infos: Any) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for index, info in infos:
            joined = self._add_info(joined, info, index)
        return joined


def _result(index: int, step: Future[Transition]) -> Transition:
    try:
        return step.result()
    except Exception as error:
        error.add_note(f"raised in sub-environment {index}")
        raise
