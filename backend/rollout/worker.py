"""The rollout worker: the scheduler, the engine and evaluation on one event loop in a thread beside the trainer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sparring.backend.buffer import TrajectoryBuffer
from sparring.backend.rollout.batch import Batch
from sparring.backend.rollout.episode import EpisodePlayer
from sparring.backend.rollout.evaluation import RunningEvaluation, Tally, evaluation_specs, play_evaluation
from sparring.backend.rollout.loop import LoopThread
from sparring.backend.rollout.sampler import Sampler
from sparring.backend.rollout.scheduler import ATTEMPTS, GroupScheduler
from sparring.backend.rollout.stats import RolloutStats
from sparring.config import RolloutConfig
from sparring.errors import TrainerError
from sparring.types import RunEpisode, Trajectory

if TYPE_CHECKING:
    from sparring.backend.engines.base import Engine, SamplingParams
    from sparring.backend.gateway import Recorder

__all__ = ["RolloutWorker"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 900.0  # a large engine converts its model on the first start
_STOP_TIMEOUT_S = 20.0
_PROBE_TURNS, _PROBE_TURN_TOKENS = 2, 64
_SHARE_BESIDE = 0.25  # of the episodes that training plays at once


class Server(Protocol):
    """What serves the recorder to other processes (`backend.gateway.http.GatewayServer`), on the worker's loop."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class RolloutWorker:
    """TRL's `RolloutWorkerProtocol`: plays episodes while the trainer trains. It owns the engine's life, and that of
    `server`, the recorder's HTTP face, where agents need one.

    `open` starts the loop and the engine, so that weights can be published and tasks evaluated; `start` lets groups
    begin; `stop` ends everything and leaves the buffer, which stays its opener's, resumable. Where a run goes on from
    a checkpoint, `update_model_version` comes before the first `start` or `evaluate`. Methods are called from other
    threads than the loop's.

    Args:
        on_wait: called every half second while `next_batch` waits, in its caller's thread.

    Attributes:
        metrics_queue: one dict of statistics a batch, as TRL's trainers drain it; the oldest go when nobody does.
        rollout_buffer: always empty. TRL's trainers pull single samples from such a queue; ours calls `next_batch`,
            since what may be trained depends on the version that asks.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        recorder: Recorder,
        run_episode: RunEpisode,
        sampler: Sampler,
        config: RolloutConfig,
        buffer: TrajectoryBuffer,
        server: Server | None = None,
        on_wait: Callable[[RolloutStats], None] | None = None,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._server = server
        self._on_wait = on_wait
        self._sampler = sampler
        self._config = config
        self._buffer = buffer
        self._run_episode = run_episode
        self._player = EpisodePlayer(recorder, run_episode, config)
        self._scheduler = GroupScheduler(
            engine=engine, player=self._player, sampler=sampler, config=config, buffer=buffer
        )
        self._thread = LoopThread("sparring-rollouts")
        self._opened = False
        self._stopped = False
        self._version = 0
        self._joined_at: int | None = None
        self._evaluations = itertools.count()
        self._evaluating: set[asyncio.Task[Any]] = set()
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(maxsize=64)

    @property
    def version(self) -> int:
        """Of the weights that were published last."""
        return self._version

    def open(self) -> None:
        """Start the loop and the engine, once; later calls do nothing.

        Raises:
            EngineError: the engine did not start.
        """
        if not self._opened:
            self._thread.start()
            self._opened = True
            self._thread.run(self._engine.start(), _START_TIMEOUT_S)  # loading may well block the loop
            if self._server is not None:
                self._thread.run(self._server.start(), _START_TIMEOUT_S)

    def start(self) -> None:
        """Let groups begin, at the version published last.

        Raises:
            BufferStateError: the buffer does not fit that checkpoint.
        """
        self.open()
        self._join_history()
        if self._joined_at != self._version:
            raise TrainerError(
                f"the worker joined its buffer at version {self._joined_at} and would start at {self._version}: "
                "publish the checkpoint's version before the first evaluation"
            )
        self.run(self._scheduler.start(self._version), _START_TIMEOUT_S)

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """End all episodes, the engine and the loop. Idempotent; always returns, and logs what went wrong.

        Groups in flight stay so in the buffer; the next process plays the members that they lack. Each of the three
        ends has `timeout_s`; a loop that something blocks for so long is left behind.
        """
        if self._stopped:
            return
        self._stopped = True
        try:
            if self._thread.alive:
                self._thread.run(self._shut_down(timeout_s), 3 * timeout_s, check=lambda: self._check_loop(timeout_s))
        except Exception:
            _log.exception("the rollout worker did not shut down cleanly")
        finally:
            if not self._thread.stop(timeout_s):
                _log.error("the rollout worker's thread hangs in a blocking call and was left behind")

    def check_health(self, stale_after_s: float = 60.0) -> None:
        """Raise what ended the rollouts, or TrainerError where their loop has stood still for so long."""
        if self._scheduler.failure is not None:
            raise self._scheduler.failure
        if not self._thread.alive:
            state = "was stopped" if self._stopped else "has died" if self._opened else "is not open yet"
            raise TrainerError(f"the thread of the rollout worker {state}")
        self._check_loop(stale_after_s)

    def update_model_version(self, model_version: int) -> None:
        """The weights after so many optimizer steps are live in the engine: groups meant for them may begin."""
        self._version = max(self._version, model_version)
        if self._thread.alive:
            self._thread.call(lambda: self._scheduler.publish(model_version))

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run something on the worker's loop and wait for it; ends early where the rollouts have died.

        Raises:
            TimeoutError: it took longer, and was cancelled.
        """
        return self._thread.run(coroutine, timeout_s, check=self.check_health)

    def next_batch(self, version: int, timeout_s: float) -> Batch:
        """Wait for the groups of step `version + 1`, and mark them consumed by it.

        The engine may still have weights of up to η updates before `version`: an evaluation holds them.

        Raises:
            TrainerError: not in time; no group with signal; the step has its batch already.
            EngineError: the engine died.
            BufferStateError: the buffer cannot keep its promise.
        """

        def look() -> None:
            self.check_health()
            if self._on_wait is not None:
                self._on_wait(self.stats())

        self.check_health()
        # The deadline is held on the loop, between two looks at the buffer: held out here, it could pass in the very
        # moment in which a batch is taken, and the batch be lost.
        batch = self._thread.run(self._scheduler.take(version, timeout_s), timeout_s + 60.0, check=look)
        if self.metrics_queue.full():
            self.metrics_queue.get_nowait()
        self.metrics_queue.put_nowait(dict(batch.stats))
        return batch

    def evaluate(
        self,
        tasks: Mapping[str, Sequence[str]],
        *,
        split: str,
        sampling: SamplingParams,
        version: int,
    ) -> list[Trajectory]:
        """As `start_evaluation`, and wait for it."""
        return self.start_evaluation(tasks, split=split, sampling=sampling, version=version).result()

    def start_probe(self, tasks: Mapping[str, Sequence[str]], *, sampling: SamplingParams) -> RunningEvaluation:
        """Begin to play training tasks by the live weights, for what is sampled and not for what comes of it: no more
        than two short turns each, so that it holds a turn upon a turn, and no long episode is waited for."""
        bounds = {"max_turns": _PROBE_TURNS, "max_episode_tokens": _PROBE_TURNS * _PROBE_TURN_TOKENS}
        config = self._config.model_copy(
            update={knob: min(bound, getattr(self._config, knob)) for knob, bound in bounds.items()}
        )
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, _PROBE_TURN_TOKENS))
        player = EpisodePlayer(self._recorder, self._run_episode, config)
        return self._play(tasks, "probe", player, split="train", sampling=sampling, version=self._version)

    def start_evaluation(
        self,
        tasks: Mapping[str, Sequence[str]],
        *,
        split: str,
        sampling: SamplingParams,
        version: int,
        beside: bool = False,
    ) -> RunningEvaluation:
        """Begin to play held-out tasks once each, beside the training episodes.

        Args:
            tasks: ids of tasks by id of their environment.
            version: of the weights that are live. No others may be published before it is done.
            beside: at low priority: so few episodes at once that training keeps most of the engine.
        """
        return self._play(
            tasks, "eval", self._player, split=split, sampling=sampling, version=version, beside=beside
        )

    def _play(
        self,
        tasks: Mapping[str, Sequence[str]],
        kind: str,
        player: EpisodePlayer,
        *,
        split: str,
        sampling: SamplingParams,
        version: int,
        beside: bool = False,
    ) -> RunningEvaluation:
        self.open()
        self.update_model_version(version)
        self._join_history()
        prefix = f"{kind}.{self._buffer.incarnation}.{next(self._evaluations)}.v{version}"
        specs = [
            spec
            for place, (env_id, task_ids) in enumerate(tasks.items())
            for spec in evaluation_specs(
                env_id,
                task_ids,
                split=split,
                seed=self._sampler.seed,
                prefix=f"{prefix}.{place}" if place else prefix,
            )
        ]
        concurrency = self._config.max_running_groups * self._config.group_size
        if beside:
            concurrency = max(1, round(concurrency * _SHARE_BESIDE))
        rounds = -(-len(specs) // concurrency) * ATTEMPTS
        timeout_s = rounds * (self._config.episode_timeout_s + 30.0) + 30.0
        tally = Tally()
        played = play_evaluation(
            player,
            [(spec, 0) for spec in specs],
            store=partial(self._buffer.store, evaluation=True),
            sampling=sampling,
            concurrency=concurrency,
            attempts=ATTEMPTS,
            on_progress=tally.count,
        )
        future = self._thread.submit(self._owned(played), timeout_s)
        return RunningEvaluation(version, len(specs), timeout_s, future, self._wait, tally)

    def _wait(self, future: Future[T], timeout_s: float, on_wait: Callable[[], None]) -> T:
        def look() -> None:
            self.check_health()
            on_wait()

        return self._thread.wait(future, timeout_s, check=look)

    async def _owned(self, evaluation: Coroutine[Any, Any, T]) -> T:
        """So that `stop` ends it, should nobody wait for it any more."""
        task = asyncio.current_task()
        assert task is not None
        self._evaluating.add(task)
        try:
            return await evaluation
        finally:
            self._evaluating.discard(task)

    def stats(self) -> RolloutStats:
        """Counters for a display: cheap, from any thread, and perhaps a moment old."""
        admission, meter = self._scheduler.admission, self._scheduler.meter
        return RolloutStats(
            version=admission.version,
            running_groups=admission.running,
            ready_groups=admission.ready,
            running_episodes=meter.running_episodes,
            episodes=meter.total["episodes"],
            sampled_tokens=meter.total["tokens"],
            dropped_groups=meter.total["dropped_groups"],
            expired_groups=meter.total["expired_groups"],
            expired_episodes=meter.total["expired_episodes"],
            failures=dict(meter.failures),
            since_batch=meter.since_batch,
            last_batch=meter.last_batch,
        )

    def _check_loop(self, stale_after_s: float) -> None:
        if self._thread.silent_s > stale_after_s:
            raise TrainerError(
                f"the rollout worker's event loop has stood still for {self._thread.silent_s:.0f} s: "
                "something blocks it, perhaps an environment that waits without await"
            )

    def _join_history(self) -> None:
        """Begin this process's incarnation in the buffer, at the version published last."""
        if self._joined_at is None:
            self._buffer.begin(self._version)
            self._joined_at = self._version

    async def _shut_down(self, timeout_s: float) -> None:
        evaluating = set(self._evaluating)
        for task in evaluating:
            task.cancel()
        await self._scheduler.stop(timeout_s)
        if evaluating:
            await asyncio.wait(evaluating, timeout=timeout_s)
        try:
            if self._server is not None:
                await asyncio.wait_for(self._server.stop(), timeout_s)
            await asyncio.wait_for(self._recorder.aclose(), timeout_s)
        finally:
            await asyncio.wait_for(self._engine.stop(), timeout_s)
