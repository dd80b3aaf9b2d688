"""The scheduler's laws, over the real recorder, buffer and admission: no order of episodes that finish, fail or
straggle, of groups that are dropped, of updates, checkpoints and kills trains a token beyond the bound, trains a
trajectory twice, or stalls a step for ever.

Weights are told apart by where they stand in the run's history, a tree that branches at every resume: two weights may
share a version and be many updates apart.
"""

import asyncio
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparring.backend.buffer import BufferView, TrajectoryBuffer
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import Recorder
from sparring.backend.rollout import TaskSampler
from sparring.backend.rollout.episode import EpisodePlayer
from sparring.backend.rollout.scheduler import GroupScheduler
from sparring.config import RolloutConfig
from sparring.errors import TrainerError
from sparring.types import EpisodeResult, EpisodeSpec, Failure, Message, StopReason

END = 1
History = tuple[int, ...]  # names of all weights from the first to the present ones


def updates_between(one: History, other: History) -> int:
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return len(one) + len(other) - 2 * common


class SchedulerMachine(RuleBasedStateMachine):
    chat = None  # a ChatFormat, put here by the test

    @initialize(
        b=st.integers(1, 2),
        eta=st.integers(0, 2),
        group_size=st.integers(2, 3),
        running=st.integers(1, 4),
        extra=st.integers(0, 3),
        refill=st.integers(0, 3),
    )
    def begin(self, b, eta, group_size, running, extra, refill):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "buffer.db"
        self.config = RolloutConfig(
            group_size=group_size,
            groups_per_step=b,
            staleness=eta,
            max_running_groups=running,
            buffer_groups=b + extra,
            max_refill=refill,
        )
        self.loop = asyncio.new_event_loop()
        self.names = iter(range(1, 10**6))
        self.sampled_by: dict[str, list[History]] = defaultdict(list)
        self.trained: dict[int, list[str]] = {}
        self.checkpoint: tuple[History, dict[int, list[str]]] = ((0,), {})
        self.scheduler: GroupScheduler | None = None
        self.resume()

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def settle(self):
        """Let everything that can happen happen: what waits then waits for a rule."""

        async def turns():
            for _ in range(40):
                await asyncio.sleep(0)

        self.run(turns())
        assert self.scheduler.failure is None, self.scheduler.failure

    def resume(self):
        self.history, trained = self.checkpoint
        self.live = self.history  # the engine's weights: the trainer's, or earlier ones that an evaluation holds
        self.trained = dict(trained)
        self.waiting: dict[str, asyncio.Future[EpisodeResult | None]] = {}
        self.engine = ScriptedEngine(lambda prompt: [2, END])
        self.engine.version = self.version
        self.buffer = TrajectoryBuffer.open(self.path)
        self.buffer.begin(self.version)
        recorder = Recorder(self.engine, self.chat, SamplingParams(max_new_tokens=4), max_length=256)
        self.scheduler = GroupScheduler(
            engine=self.engine,
            player=EpisodePlayer(recorder, self.play, self.config),
            sampler=TaskSampler("x/X-v0", ["a", "b", "c"], group_size=self.config.group_size, seed=0),
            config=self.config,
            buffer=self.buffer,
        )
        self.run(self.engine.start())
        self.run(self.scheduler.start(self.version))
        self.settle()

    @property
    def version(self) -> int:
        return len(self.history) - 1

    async def play(self, spec: EpisodeSpec, session) -> EpisodeResult:
        """Turns of chat until a rule says how it ends."""
        messages = []
        self.sampled_by[spec.episode_id] = []
        while True:
            messages.append(Message("user", "yes"))
            messages.append((await session.chat(messages)).message)
            self.sampled_by[spec.episode_id].append(self.live)
            self.waiting[spec.episode_id] = asyncio.get_running_loop().create_future()
            result = await self.waiting[spec.episode_id]
            if result is not None:
                return result

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), what=st.sampled_from(["right", "right", "wrong", "fails", "goes on"]))
    def episode(self, data, what):
        episode_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.pop(episode_id).set_result(
            {
                "right": EpisodeResult(StopReason.FINISHED, reward=1.0),
                "wrong": EpisodeResult(StopReason.FINISHED, reward=0.0),
                "fails": EpisodeResult(StopReason.FAILED, failure=Failure("sandbox", "gone")),
                "goes on": None,
            }[what]
        )
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def group(self, data):
        """All of a group that waits ends, and carries signal."""
        group_id = data.draw(st.sampled_from(sorted({e.split(".")[0] for e in self.waiting})))
        self.end_with_signal([e for e in self.waiting if e.startswith(group_id)])

    @rule()
    def steps(self):
        """All but one episode, the straggler, end until the trainer has nothing more to do."""
        straggler = min(self.waiting, default=None)
        for _ in range(4):
            if self.computing:
                self.publish()
            self.end_with_signal([e for e in self.waiting if e != straggler])
            self.try_to_train()

    def end_with_signal(self, episode_ids: list[str]):
        for episode_id in episode_ids:
            member = int(episode_id.split(".")[1])
            self.waiting.pop(episode_id).set_result(EpisodeResult(StopReason.FINISHED, reward=float(member)))
        self.settle()

    @property
    def computing(self) -> bool:
        """A batch was taken, and its update is not done yet."""
        return self.scheduler.admission.step > self.version

    @precondition(lambda self: not self.computing)
    @rule()
    def train(self):
        self.try_to_train()

    def try_to_train(self) -> bool:
        refused = self.scheduler.admission.refused
        try:
            batch = self.run(self.scheduler.take(self.version, 0.0))
        except TrainerError as error:
            assert "no batch" in str(error) or "no group with signal" in str(error)  # noqa: PT017
            self.settle()
            return "no group with signal" in str(error)
        assert batch.step == self.version + 1
        assert 0 < len(batch.groups) <= self.config.groups_per_step
        if len(batch.groups) < self.config.groups_per_step:
            assert refused + batch.stats["groups/dropped"] > self.config.max_refill, "a short step without need"
        before = {episode_id for ids in self.trained.values() for episode_id in ids}
        for group in batch.groups:
            assert len(group.trajectories) >= 2
            assert len({t.reward for t in group.trajectories}) > 1
            for trajectory in group.trajectories:
                assert trajectory.episode_id not in before, "trained twice"
                for weights in self.sampled_by[trajectory.episode_id]:
                    assert updates_between(weights, self.history) <= self.config.staleness, "beyond the bound"
        self.trained[batch.step] = [t.episode_id for g in batch.groups for t in g.trajectories]
        self.settle()
        return True

    @precondition(lambda self: self.computing)
    @rule()
    def publish(self):
        self.history = (*self.history, next(self.names))
        self.publish_held()

    @precondition(lambda self: self.computing and len(self.history) + 1 - len(self.live) <= self.config.staleness)
    @rule()
    def update_while_an_evaluation_holds_the_weights(self):
        self.history = (*self.history, next(self.names))

    @precondition(lambda self: not self.computing and self.live != self.history)
    @rule()
    def publish_held(self):
        self.live = self.history
        self.run(self.engine.update_weights(self.version, []))
        self.scheduler.publish(self.version)
        self.settle()

    @precondition(lambda self: not self.computing)
    @rule()
    def save_checkpoint(self):
        self.checkpoint = (self.history, dict(self.trained))

    @rule()
    def prune_what_no_resume_needs(self):
        self.buffer.prune(len(self.checkpoint[0]) - 1)

    @rule(really=st.sampled_from([False, False, True]))
    def kill_and_resume(self, really):
        if really:
            self.stop()
            self.resume()

    def stop(self):
        self.buffer.close()  # first, so that nothing is written on the way out
        self.run(self.scheduler.stop(5))

    @invariant()
    def nothing_runs_beyond_the_bound(self):
        admission = self.scheduler.admission
        states = list(self.group_states().values())
        assert (admission.ready, len(self.scheduler._ready)) == (states.count("ready"),) * 2
        if admission.running:
            bound = (admission.version + self.config.staleness + 1) * self.config.groups_per_step
            assert admission.running + admission.accepted <= bound
            assert admission.running <= self.config.max_running_groups

    def group_states(self) -> dict[str, str]:
        with BufferView(self.path) as view:
            return view.group_states()

    @invariant()
    def the_ledger_says_what_was_trained(self):
        with BufferView(self.path) as view:
            consumed = defaultdict(list)
            for row in view.ledger():
                if row.state == "consumed":
                    consumed[row.consumed_step].append(row.episode_id)
        assert {step: sorted(ids) for step, ids in consumed.items()} == {
            step: sorted(ids) for step, ids in self.trained.items()
        }

    def teardown(self):
        if getattr(self, "scheduler", None) is None:
            return
        if self.computing:
            self.publish()
        for _ in range(60):
            if self.try_to_train():
                break
            self.end_with_signal(list(self.waiting))
        else:
            raise AssertionError("a step never came, though every episode ends")
        self.stop()
        self.loop.close()
        self.folder.cleanup()


@pytest.mark.slow
def test_no_order_of_events_breaks_the_laws(word_chat):
    SchedulerMachine.chat = word_chat
    machine = SchedulerMachine.TestCase
    machine.settings = settings(
        max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine().runTest()
