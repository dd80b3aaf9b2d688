"""One episode from its spec to its trajectory, whatever happens on the way."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sparring.errors import SparringError
from sparring.types import (
    ChatClient,
    EpisodeResult,
    EpisodeSpec,
    Failure,
    RunEpisode,
    StopReason,
    TokenSequence,
    Trajectory,
    Usage,
)

if TYPE_CHECKING:
    from sparring.backend.engines.base import SamplingParams
    from sparring.config import RolloutConfig

__all__ = ["EpisodePlayer", "Sessions"]


_CANCEL_GRACE_S = 5.0


class Record(Protocol):
    """What a session leaves behind."""

    @property
    def sequences(self) -> Sequence[TokenSequence]: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def messages(self) -> Sequence[Mapping[str, Any]]: ...


class Sessions(Protocol):
    """Where episodes are sampled: the recorder over an engine, or an `Endpoint`, which gives no tokens."""

    def open_session(
        self, session_id: str, *, turn_budget: int, token_budget: int, evaluation: SamplingParams | None = None
    ) -> ChatClient: ...

    def close_session(self, session_id: str) -> Record: ...


class EpisodePlayer:
    """Plays episodes in sessions of their own, each under a wall-clock deadline.

    Attributes:
        abandoned: episodes whose code went on after they were cancelled; their sessions are closed, so whatever they
            still do reaches no engine and no trajectory.
    """

    def __init__(self, sessions: Sessions, run_episode: RunEpisode, config: RolloutConfig) -> None:
        self._sessions = sessions
        self._run_episode = run_episode
        self._config = config
        self.abandoned: set[asyncio.Task[EpisodeResult]] = set()

    async def play(self, spec: EpisodeSpec, *, evaluation: SamplingParams | None = None) -> Trajectory:
        """Play `spec` to its end; `evaluation` samples otherwise than the run does. Raises CancelledError alone."""
        started_at = time.time()
        session = self._sessions.open_session(
            spec.episode_id,
            turn_budget=self._config.max_turns,
            token_budget=self._config.max_episode_tokens,
            evaluation=evaluation,
        )
        try:
            result = await self._bounded(spec, session)
        finally:
            record = self._sessions.close_session(spec.episode_id)
        result, sequences = _checked(result, tuple(record.sequences))
        return Trajectory(
            episode_id=spec.episode_id,
            group_id=spec.group_id,
            env_id=spec.env_id,
            task_id=spec.task_id,
            seed=spec.seed,
            sequences=sequences,
            reward=result.reward,
            stop_reason=result.stop_reason,
            split=spec.split,
            attempt=spec.attempt,
            reward_parts=result.reward_parts,
            turn_rewards=result.turn_rewards,
            agent_rewards=result.agent_rewards,
            failure=result.failure,
            usage=record.usage,
            messages=tuple(record.messages),
            started_at=started_at,
            finished_at=time.time(),
        )

    async def _bounded(self, spec: EpisodeSpec, session: ChatClient) -> EpisodeResult:
        """Run the episode under its deadline. One that ignores its cancellation is left behind, not waited for."""
        task = asyncio.create_task(self._guarded(spec, session))
        try:
            await asyncio.wait({task}, timeout=self._config.episode_timeout_s)
            if not task.done():
                await self._cancel(task)
                limit = f"rollout.episode_timeout_s={self._config.episode_timeout_s:g}"
                return _failed("deadline", f"no end within {limit}, waits for the engine among it", StopReason.DEADLINE)
        except asyncio.CancelledError:
            await self._cancel(task)
            raise
        return _failed("agent", "the episode cancelled itself") if task.cancelled() else task.result()

    async def _guarded(self, spec: EpisodeSpec, session: ChatClient) -> EpisodeResult:
        try:
            return await self._run_episode(spec, session)
        except (Exception, SystemExit) as error:  # asyncio would let a SystemExit end the whole loop
            kind = error.kind if isinstance(error, SparringError) else SparringError.kind
            return _failed(kind, f"{type(error).__name__}: {error}")

    async def _cancel(self, task: asyncio.Task[EpisodeResult]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
        if not task.done():
            self.abandoned.add(task)
            task.add_done_callback(self.abandoned.discard)


def _failed(kind: str, message: str, stop_reason: StopReason = StopReason.FAILED) -> EpisodeResult:
    return EpisodeResult(stop_reason, failure=Failure(kind, message))


def _checked(
    result: EpisodeResult, sequences: tuple[TokenSequence, ...]
) -> tuple[EpisodeResult, tuple[TokenSequence, ...]]:
    """The result with plain, finite numbers: others are an environment's or an engine's fault, and cannot be stored."""
    if not all(np.isfinite(s.behaviour_logprobs).all() for s in sequences):
        return _failed("engine", "the engine gave a log-probability that is not finite"), ()
    if result.reward is None:
        return replace(result, reward_parts={}, turn_rewards=(), agent_rewards={}), sequences
    try:
        plain = replace(
            result,
            reward=_finite(result.reward),
            reward_parts={name: _finite(value) for name, value in result.reward_parts.items()},
            turn_rewards=tuple(map(_finite, result.turn_rewards)),
            agent_rewards={name: _finite(value) for name, value in result.agent_rewards.items()},
        )
    except (TypeError, ValueError) as error:
        return _failed("task", f"the environment gave a reward that is no finite number: {error}"), sequences
    return plain, sequences


def _finite(value: float) -> float:
    number = float(value)  # numpy's numbers among them, which JSON does not know
    if not math.isfinite(number):
        raise ValueError(repr(value))
    return number
