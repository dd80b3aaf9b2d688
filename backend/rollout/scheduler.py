"""The scheduler: starts groups within the staleness bound, plays them, and forms whole batches. One event loop."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparring.backend.buffer import StoredGroup, StoredTrajectory, TrajectoryBuffer
from sparring.backend.rollout.admission import Admission
from sparring.backend.rollout.batch import Batch
from sparring.backend.rollout.episode import EpisodePlayer
from sparring.backend.rollout.sampler import Sampler
from sparring.backend.rollout.selection import has_signal, trajectory_lag
from sparring.backend.rollout.stats import RolloutMeter, batch_stats
from sparring.config import RolloutConfig
from sparring.errors import EngineError, TrainerError, first_error
from sparring.transcript import printable, said
from sparring.types import Group, Trajectory

if TYPE_CHECKING:
    from sparring.backend.engines.base import Engine

__all__ = ["ATTEMPTS", "GroupScheduler"]

ATTEMPTS = 2  # an episode that fails is played once more

_WATCH_S = 1.0
_ENGINE_GRACE_S = 15.0  # how long an engine may be sick (a server that restarts) before the run stops


class GroupScheduler:
    """Plays groups in the background, from `start` to `stop`; `take` forms the batch of a step.

    The buffer holds the truth; what is ready is held in memory as well, so that no batch waits for decoding. Every
    method runs on one event loop, and every change of state is one step without `await`: what the buffer, the counts
    and the memory say never differs where anyone can see it.

    Attributes:
        failure: what ended the background work, or None.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        player: EpisodePlayer,
        sampler: Sampler,
        config: RolloutConfig,
        buffer: TrajectoryBuffer,
    ) -> None:
        self._engine = engine
        self._player = player
        self._sampler = sampler
        self._config = config
        self._buffer = buffer
        self._position = 0
        self._backlog: deque[StoredGroup] = deque()
        self._ready: dict[str, StoredGroup] = {}
        self._refused: deque[StoredGroup] = deque(maxlen=3)
        self._changed = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self.admission = Admission(config)
        self.meter = RolloutMeter()
        self.failure: Exception | None = None

    def publish(self, version: int) -> None:
        """The weights of `version` are live: groups meant for them may start."""
        self.admission.publish(version)
        self._notify()

    async def start(self, version: int) -> None:
        """Take up what the buffer holds, and begin to play. The weights of `version` are live.

        Groups that were in flight are played to their end before new ones are drawn, and wait for room like them: the
        staleness bound holds after a resume too.
        """
        if self._main is not None:
            raise TrainerError("the rollout worker was started twice")
        self._ready = {group.spec.group_id: group for group in self._buffer.ready_groups()}
        self._backlog.extend(self._buffer.interrupted_groups())
        self._position = self._buffer.next_seq
        for spec, rewards in self._buffer.group_rewards():
            self._sampler.learn(spec, rewards)
        self.admission = Admission(self._config, version=version, ready=len(self._ready))
        self.meter.close_window()  # what came before, a start-up or an evaluation, belongs to no step
        self._main = asyncio.create_task(self._serve())

    async def stop(self, timeout_s: float) -> None:
        """Cancel all that runs, and wait so long for its end."""
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait({self._main}, timeout=timeout_s)

    async def take(self, version: int, timeout_s: float) -> Batch:
        """See `RolloutWorker.next_batch`."""
        if self._main is None:
            raise TrainerError("the rollout worker plays nothing yet: start it before the first batch")
        if self.admission.step != version:
            raise TrainerError(
                f"step {version + 1} has its batch already"
                if self.admission.step > version
                else f"the step before step {version + 1} has taken no batch: weights that nobody trained?"
            )
        if self.admission.lagging(version):
            raise TrainerError(
                f"step {version + 1} could train nothing that the engine samples: its weights are those of version "
                f"{self.admission.version}, and rollout.staleness={self._config.staleness}; publish newer ones first"
            )
        asked_at = time.monotonic()
        checked: set[str] = set()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self.failure is not None:
                        raise self.failure
                    self._expire(version, [g for group_id, g in self._ready.items() if group_id not in checked])
                    checked.update(self._ready)
                    if self.admission.due:
                        return self._consume(version, time.monotonic() - asked_at)
                    await self._changed.wait()
        except TimeoutError:
            raise TrainerError(
                f"no batch for step {version + 1} within {timeout_s:g} s: {self.admission.ready} of "
                f"{self._config.groups_per_step} groups are ready, {self.admission.running} run "
                f"({self.meter.running_episodes} episodes); raise the time, or lower rollout.episode_timeout_s"
            ) from None

    async def _serve(self) -> None:
        """Everything that runs in the background; the first thing that fails ends all of it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_engine())
                while True:
                    while self.admission.may_start:
                        self.admission.start()
                        group = self._backlog.popleft() if self._backlog else self._draw()
                        tasks.create_task(self._play_group(group))
                    await self._changed.wait()
        except Exception as error:
            self.failure = first_error(error)
            self._notify()

    def _notify(self) -> None:
        """Wake everyone who waits for a change: the scheduler, and the trainer's call."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _draw(self) -> StoredGroup:
        spec = self._sampler.group(self._position)
        self._buffer.start_group(spec)
        self.meter.count("skipped_groups", spec.seq - self._position)
        self._position = spec.seq + 1
        return StoredGroup(spec)

    async def _play_group(self, group: StoredGroup) -> None:
        members = list(group.members)

        async def play_member(member: int, attempt: int) -> None:
            while attempt < ATTEMPTS:
                trajectory = await self._play_episode(group, member, attempt)
                members.append(StoredTrajectory(trajectory))
                if not trajectory.failed:
                    break
                attempt += 1

        async with asyncio.TaskGroup() as tasks:
            for member, attempt in group.missing(ATTEMPTS):
                tasks.create_task(play_member(member, attempt))
        members.sort(key=lambda m: m.trajectory.episode_id)
        self._finish_group(StoredGroup(group.spec, tuple(members)))

    async def _play_episode(self, group: StoredGroup, member: int, attempt: int) -> Trajectory:
        self.meter.episode_started()
        try:
            trajectory = await self._player.play(group.spec.episode(member, attempt))
        finally:
            self.meter.episode_ended()
        self._buffer.store(trajectory)
        self.meter.add(trajectory)
        return trajectory

    def _finish_group(self, group: StoredGroup) -> None:
        group_id = group.spec.group_id
        rewards = [reward for m in group.survivors if (reward := m.trajectory.reward) is not None]
        self._sampler.learn(group.spec, rewards)
        if has_signal([m.trajectory for m in group.survivors]):
            self._buffer.accept_group(group_id)
            self.admission.accept()
            self._ready[group_id] = group
        else:
            self._buffer.drop_group(group_id, "no signal" if len(group.survivors) > 1 else "failures")
            self.admission.refuse()
            self.meter.group_dropped(rewards)
            self._refused.append(group)
        self._notify()

    def _expire(self, version: int, groups: Sequence[StoredGroup]) -> None:
        """Take out episodes over the staleness bound, and groups of which too little is left."""
        for group in groups:
            lags = {m.trajectory.episode_id: trajectory_lag(m, version) for m in group.survivors}
            stale = [episode_id for episode_id, lag in lags.items() if lag > self._config.staleness]
            if not stale:
                continue
            kept = StoredGroup(group.spec, tuple(m for m in group.members if m.trajectory.episode_id not in stale))
            group_id = group.spec.group_id
            trains = has_signal([m.trajectory for m in kept.survivors])
            self._buffer.expire(stale, [] if trains else [group_id])
            self.meter.count("expired_episodes", len(stale))
            if trains:
                self._ready[group_id] = kept
                continue
            del self._ready[group_id]
            self.admission.expire()
            self.meter.count("expired_groups")
            self._notify()

    def _consume(self, version: int, waited_s: float) -> Batch:
        if not self._ready:
            raise TrainerError(self._no_signal_report())
        # What is closest to its staleness bound goes first; then what was drawn first, so that the order repeats.
        by_urgency = sorted(
            self._ready.values(),
            key=lambda g: (-max(trajectory_lag(m, version) for m in g.survivors), g.spec.seq),
        )
        chosen = by_urgency[: self._config.groups_per_step]
        batch = {g.spec.group_id: [m.trajectory.episode_id for m in g.survivors] for g in chosen}
        self._buffer.consume(version + 1, batch)
        refills = self.admission.refills
        self.admission.take(len(chosen))
        for group_id in batch:
            del self._ready[group_id]
        trained = [(m.trajectory, trajectory_lag(m, version)) for g in chosen for m in g.survivors]
        stats = batch_stats(trained, self.meter.close_window()) | {
            "groups/refills": float(refills),
            "groups/running": float(self.admission.running),
            "episodes/running": float(self.meter.running_episodes),
            "groups/ready": float(self.admission.ready),
            "groups/trained": float(len(chosen)),
            "time/waited_s": waited_s,
        }
        self._notify()
        groups = tuple(Group(g.spec.group_id, tuple(m.trajectory for m in g.survivors)) for g in chosen)
        return Batch(version + 1, groups, stats)

    def _no_signal_report(self) -> str:
        failures = ", ".join(f"{count} {kind}" for kind, count in self.meter.failures.items()) or "none"
        samples = "\n".join(_sample(group) for group in self._refused)
        return (
            f"no group with signal: all {self.admission.refused} groups for this step had equal rewards or fewer than "
            f"two survivors (failures so far: {failures}). After more than "
            f"rollout.max_refill={self._config.max_refill} of them no more were started; those in play ended alike. "
            "Are the tasks too hard or too easy for the model, is the reward right, does the prompt show the format? "
            f"The last of them:\n{samples}"
        )

    async def _watch_engine(self) -> None:
        sick_since: float | None = None
        while True:
            try:
                health = await asyncio.wait_for(self._engine.health(), 5.0)
                problem = None if health.ok else health.detail or "not healthy"
            except (EngineError, TimeoutError) as error:
                problem = str(error) or "no answer within 5 s"
            if problem is None:
                sick_since = None
            else:
                sick_since = sick_since or time.monotonic()
                if time.monotonic() - sick_since > _ENGINE_GRACE_S:
                    raise EngineError(f"the engine has been failing for {_ENGINE_GRACE_S:g} s: {problem}")
            await asyncio.sleep(_WATCH_S)


def _sample(group: StoredGroup) -> str:
    """A group's rewards and failures, and the end of one of its conversations."""
    trajectories = [m.trajectory for m in group.members]
    rewards = [
        f"{t.reward:g}" if t.failure is None else f"{t.failure.kind}: {printable(t.failure.message[:200])}"
        for t in trajectories
    ]
    lines = [f"group {group.spec.group_id}, task {group.spec.task_id}, rewards {', '.join(rewards)}"]
    messages = next((t.messages for t in trajectories if t.messages), ())
    lines += [f"    {message['role']}: {textwrap.shorten(said(message), 300)}" for message in messages[-4:]]
    return "\n".join(lines)
