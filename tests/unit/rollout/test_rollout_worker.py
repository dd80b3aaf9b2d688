"""The rollout worker end to end, over a scripted engine: batches, staleness, failures, ends."""

import asyncio
import threading

import numpy as np
import pytest

from sparring.backend.rollout import episode as episode_module
from sparring.errors import BufferStateError, EngineError, TrainerError
from sparring.types import EpisodeResult, Failure, StopReason


def finished(reward: float) -> EpisodeResult:
    return EpisodeResult(StopReason.FINISHED, reward=reward)


def failed(kind: str = "sandbox") -> EpisodeResult:
    return EpisodeResult(StopReason.FAILED, failure=Failure(kind, "no such container"))


def member_of(spec) -> int:
    return int(spec.episode_id.split(".")[-2])


def seq_of(spec) -> int:
    return int(spec.group_id[1:])


def test_steps_take_whole_batches_within_the_bound_and_each_trajectory_once(make_rig):
    rig = make_rig(tasks=1)  # a data set smaller than a batch
    rig.worker.start()
    batches = rig.train(1, 6)
    assert [batch.step for batch in batches] == list(range(1, 7))
    for batch in batches:
        assert len(batch.groups) == 2
        versions = [t.oldest_version for g in batch.groups for t in g.trajectories]
        assert all(batch.step - 1 - v <= 1 for v in versions)
        assert batch.stats["lag/max"] == max(batch.step - 1 - v for v in versions)
    trained = [(t.episode_id, b.step) for b in batches for g in b.groups for t in g.trajectories]
    assert len(dict(trained)) == len(trained) == 24
    assert dict(trained) == {e: step for e, (state, step) in rig.fates().items() if state == "consumed"}


def test_a_synchronous_run_plays_for_a_version_only_once_it_is_published(make_rig):
    rig = make_rig(config={"staleness": 0})
    rig.worker.start()
    for batch in rig.train(1, 4):
        assert {t.oldest_version for g in batch.groups for t in g.trajectories} == {batch.step - 1}
    groups_at = [version for version, spec in rig.started if member_of(spec) == 0]
    assert groups_at[:8] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_asynchronous_run_plays_ahead_while_the_trainer_is_busy(make_rig):
    rig = make_rig(config={"staleness": 2})
    rig.worker.start()
    rig.worker.next_batch(0, 10)
    rig.publish(1)
    batch = rig.worker.next_batch(1, 10)
    assert {t.oldest_version for g in batch.groups for t in g.trajectories} == {0}


def test_a_failed_episode_is_stored_retried_once_and_masked_out(make_rig):
    rig = make_rig(
        config={"group_size": 3},
        play=lambda spec: failed() if member_of(spec) == 0 and spec.attempt == 0 else finished(member_of(spec)),
    )
    rig.worker.start()
    (batch,) = rig.train(1, 1)
    assert [[t.attempt for t in g.trajectories] for g in batch.groups] == [[1, 0, 0]] * 2
    assert batch.stats["failures/sandbox"] >= 2
    first = batch.groups[0].group_id
    assert rig.fates()[f"{first}.00.0"] == ("failed", None)
    assert rig.fates()[f"{first}.00.1"] == ("consumed", 1)


def test_a_ragged_group_trains_on_two_survivors_and_one_is_too_few(make_rig):
    def play(spec):
        lost = {0, 1} if seq_of(spec) == 0 else {0}
        return failed() if member_of(spec) in lost else finished(member_of(spec))

    rig = make_rig(config={"group_size": 3}, play=play)
    rig.worker.start()
    (batch,) = rig.train(1, 1)
    assert "g0000000" not in {g.group_id for g in batch.groups}
    assert all(len(g.trajectories) == 2 for g in batch.groups)
    assert rig.fates()["g0000000.02.0"] == ("dropped", None)
    assert batch.stats["groups/dropped"] >= 1


def test_groups_without_signal_are_dropped_and_refilled(make_rig):
    rig = make_rig(play=lambda spec: finished(member_of(spec) if seq_of(spec) % 3 == 0 else 1.0))
    rig.worker.start()
    batches = rig.train(1, 2)
    assert all(int(g.group_id[1:]) % 3 == 0 for b in batches for g in b.groups)
    assert batches[0].stats["groups/refills"] >= 2
    assert rig.fates()["g0000001.00.0"] == ("dropped", None)


def test_after_max_refill_a_step_trains_on_what_it_has(make_rig):
    rig = make_rig(
        config={"max_refill": 3, "staleness": 0},
        play=lambda spec: finished(member_of(spec) if seq_of(spec) == 0 else 1.0),
    )
    rig.worker.start()
    (batch,) = rig.train(1, 1)
    assert [g.group_id for g in batch.groups] == ["g0000000"]
    assert batch.stats["groups/dropped"] == 4
    with pytest.raises(
        TrainerError,
        match=r"no group with signal: all 4 groups for this step had(.|\n)* After more than rollout\.max_refill=3 of "
        r"them no more were started(.|\n)*rewards 1, 1(.|\n)*user: yes or no\n +assistant: yes",
    ):
        rig.worker.next_batch(1, 10)


def test_a_dead_engine_ends_the_run_with_its_own_words(make_rig):
    rig = make_rig()
    rig.worker.open()
    rig.worker.run(_call(rig.engine.crash, "the server was killed"), 5)
    rig.worker.start()
    with pytest.raises(TrainerError, match=r"engine: .*the server was killed"):
        rig.worker.next_batch(0, 10)
    with pytest.raises(EngineError, match="the server was killed"):
        rig.publish(1)


async def _call(function, *arguments):
    return function(*arguments)


def test_a_straggler_over_the_bound_expires_and_holds_nobody_up(make_rig):
    rig = make_rig(config={"groups_per_step": 1}, held={"g0000000.01.0"})
    rig.worker.start()
    rig.train(1, 4)
    rig.release("g0000000.01.0")
    batches = rig.train(5, 8)
    assert sum(b.stats["groups/expired"] for b in batches) == 1
    fates = rig.fates()
    # Its quick member waited for it, at version 0 as well.
    assert fates["g0000000.00.0"] == fates["g0000000.01.0"] == ("expired", None)


def test_an_episode_past_its_deadline_is_a_failure(make_rig):
    rig = make_rig(config={"episode_timeout_s": 0.05, "staleness": 0}, held={"g0000000.00.0", "g0000000.00.1"})
    rig.worker.start()
    rig.train(1, 1)
    assert rig.fates()["g0000000.00.0"] == rig.fates()["g0000000.00.1"] == ("failed", None)
    last = rig.worker.stats().last_batch
    assert (last.failures, last.alike, last.reason.kind) == (2, 2, "deadline")
    assert "rollout.episode_timeout_s=0.05" in last.reason.message
    assert rig.worker.stats().since_batch.reason is None


def test_an_episode_that_ignores_its_cancellation_is_left_behind(make_rig, monkeypatch):
    monkeypatch.setattr(episode_module, "_CANCEL_GRACE_S", 0.02)
    rig = make_rig(config={"episode_timeout_s": 0.02})
    gate = rig.gates["stubborn"]

    async def stubborn(spec, session):
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                pass
        return finished(1.0)

    rig.worker._player._run_episode = stubborn
    rig.worker.start()
    with pytest.raises(TrainerError, match="deadline"):
        rig.train(1, 1)
    assert rig.worker._player.abandoned
    rig.release("stubborn")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError("boom"), "internal"), (SystemExit(3), "internal"), (TrainerError("x"), "trainer"), (None, "task")],
)
def test_whatever_an_episode_raises_is_a_failure_of_that_episode(make_rig, error, kind):
    def play(spec):
        if member_of(spec) == 0:
            if error is not None:
                raise error
            return EpisodeResult(StopReason.FINISHED, reward=1.0, turn_rewards=(float("nan"),))
        return finished(member_of(spec))

    rig = make_rig(config={"group_size": 3}, play=play)
    rig.worker.start()
    (batch,) = rig.train(1, 1)
    assert batch.stats[f"failures/{kind}"] >= 2
    assert all(len(g.trajectories) == 2 for g in batch.groups)


def test_numbers_of_numpy_are_rewards_too(make_rig):
    rig = make_rig(play=lambda spec: finished(np.float32(member_of(spec))))
    rig.worker.start()
    (batch,) = rig.train(1, 1)
    assert [[t.reward for t in g.trajectories] for g in batch.groups] == [[0.0, 1.0]] * 2


def test_a_buffer_that_fails_ends_the_run_behind_a_full_queue_too(make_rig):
    rig = make_rig(held={"g0000003.01.0"})
    rig.worker.start()
    rig.worker.next_batch(0, 10)
    rig.buffer._connection.execute("PRAGMA max_page_count = 1")  # the smallest it may be: what is used now
    rig.release("g0000003.01.0")
    with pytest.raises(BufferStateError, match="disk is full"):
        rig.worker.next_batch(1, 10)
    with pytest.raises(BufferStateError, match="disk is full"):
        rig.worker.check_health()


def test_next_batch_keeps_to_its_deadline_and_says_what_is_missing(make_rig):
    rig = make_rig(held={f"g000000{seq}.00.0" for seq in range(10)})
    rig.worker.start()
    with pytest.raises(TrainerError, match=r"no batch for step 1 within 0\.05 s: 0 of 2 groups are ready, 4 run"):
        rig.worker.next_batch(0, 0.05)
    for seq in range(2):
        rig.release(f"g000000{seq}.00.0")
    assert len(rig.worker.next_batch(0, 10).groups) == 2  # nothing was lost by asking too early


def test_a_step_asks_once(make_rig):
    rig = make_rig()
    with pytest.raises(TrainerError, match="not open yet"):
        rig.worker.next_batch(0, 10)
    rig.worker.open()
    with pytest.raises(TrainerError, match="start it"):
        rig.worker.next_batch(0, 10)
    rig.worker.start()
    rig.worker.next_batch(0, 10)
    with pytest.raises(TrainerError, match="step 1 has its batch already"):
        rig.worker.next_batch(0, 10)


def test_stopping_in_the_middle_ends_soon_and_resumes_with_what_was_finished(make_rig):
    rig = make_rig(config={"staleness": 0}, held={"g0000001.01.0"})
    rig.worker.start()
    with pytest.raises(TrainerError, match="no batch"):
        rig.worker.next_batch(0, 0.05)
    rig.close()
    rig.close()
    before = rig.fates()
    assert "g0000001.00.0" in before
    assert "g0000001.01.0" not in before
    with pytest.raises(TrainerError, match="was stopped"):
        rig.worker.next_batch(0, 10)

    again = make_rig()
    again.worker.start()
    again.train(1, 3)
    replayed = {spec.episode_id for _, spec in again.started}
    assert "g0000001.01.0" in replayed
    assert not replayed & before.keys()
    assert all(again.fates()[episode_id][0] == "consumed" for episode_id in before)


def test_a_group_killed_between_its_last_episode_and_its_acceptance_is_trained_without_playing_again(make_rig):
    rig = make_rig()
    rig.buffer.accept_group = rig.close_buffer_instead
    rig.worker.start()
    with pytest.raises(BufferStateError, match="closed"):
        rig.worker.next_batch(0, 10)
    complete = {e for e, (state, _) in rig.fates().items() if state == "pending"}
    assert {"g0000000.00.0", "g0000000.01.0"} <= complete
    rig.close()

    again = make_rig()
    again.worker.start()
    again.train(1, 3)
    assert not complete & {spec.episode_id for _, spec in again.started}
    assert {again.fates()[episode_id][0] for episode_id in complete} == {"consumed"}


def test_the_bound_holds_after_a_resume(make_rig):
    """Killed after step 3 with the checkpoint of step 1: steps 2 and 3 come back, and nothing starts past the bound."""
    rig = make_rig()
    rig.worker.start()
    lost = rig.train(1, 3)[1:]
    rig.close()

    again = make_rig()
    again.worker.update_model_version(1)
    again.engine.version = 1
    again.worker.start()
    stats = again.worker.stats()
    assert stats.ready_groups + stats.running_groups <= max(4, stats.ready_groups)
    batches = again.train(2, 5)
    trained = [t.episode_id for b in batches for g in b.groups for t in g.trajectories]
    assert len(set(trained)) == len(trained)
    assert {t.episode_id for b in lost for g in b.groups for t in g.trajectories} <= set(trained) | {
        e for e, (state, _) in again.fates().items() if state in ("expired", "dropped", "pending")
    }


def test_a_resumed_step_whose_groups_lay_in_the_buffer_has_their_reward(make_rig):
    """Killed after step 3 with the checkpoint of step 1: the batch of step 2 is there, and no episode ends for it."""
    rig = make_rig()
    rig.worker.start()
    rig.train(1, 3)
    rig.close()

    again = make_rig()
    again.worker.update_model_version(1)
    again.engine.version = 1
    again.worker.start()
    stats = again.worker.next_batch(1, 10).stats
    assert stats["episodes"] == 0
    assert stats["reward"] == stats["reward/trained"] == 0.5
    assert stats["reward/exact"] == 1.0
    assert (stats["episodes/tokens"], stats["episodes/turns"]) == (2.0, 1.0)


def test_what_a_step_waits_for_is_told_to_its_caller(make_rig, monkeypatch):
    monkeypatch.setattr("sparring.backend.rollout.loop._POLL_S", 0.01)
    told = []

    def look(stats):
        if stats.ready_groups == stats.running_groups == 1 and not told:
            told.append(stats.since_batch)
            rig.release("g0000004.00.0")

    def play(spec):
        return failed() if seq_of(spec) == 1 else finished(member_of(spec) if seq_of(spec) > 2 else 0.5)

    rig = make_rig(play=play, on_wait=look, config={"max_running_groups": 1}, held={"g0000004.00.0"})
    rig.worker.start()
    rig.train(1, 1)
    (since,) = told
    assert (since.dropped_groups, since.equal_rewards, since.too_few, since.failures) == (3, {0.5: 2}, 1, 4)
    assert rig.worker.stats().since_batch.equal_rewards == {}


def test_a_blocked_loop_is_noticed(make_rig):
    blocking, unblock = threading.Event(), threading.Event()

    def play(spec):
        blocking.set()
        unblock.wait(10)
        return finished(member_of(spec))

    rig = make_rig(play=play)
    rig.worker.start()
    blocking.wait(10)
    while rig.worker._thread.silent_s < 0.1:
        rig.worker._thread._thread.join(0.02)
    with pytest.raises(TrainerError, match="something blocks it"):
        rig.worker.check_health(stale_after_s=0.1)
    unblock.set()


def test_a_loop_that_ends_is_noticed_while_the_trainer_waits(make_rig):
    rig = make_rig(config={"groups_per_step": 1, "staleness": 0}, held={"g0000000.01.0"})
    rig.worker.start()
    loop = rig.worker._thread._loop
    loop.call_soon_threadsafe(loop.call_later, 0.02, loop.stop)
    with pytest.raises(TrainerError, match="event loop ended while something waited"):
        rig.worker.next_batch(0, 30)
    rig.worker._thread._thread.join(5)
    with pytest.raises(TrainerError, match="thread of the rollout worker has died"):
        rig.worker.next_batch(0, 30)


def test_the_loop_does_not_wait_for_itself(make_rig):
    rig = make_rig()
    rig.worker.open()

    async def on_the_loop():
        rig.worker.run(_call(print), 1)

    with pytest.raises(RuntimeError, match="await the coroutine"):
        rig.worker.run(on_the_loop(), 5)


def test_statistics_go_with_the_batch_and_to_trls_queue(make_rig):
    rig = make_rig()
    rig.worker.start()
    (batch,) = rig.train(1, 1)
    assert batch.stats["reward"] == batch.stats["reward/trained"] == 0.5
    assert batch.stats["reward/exact"] == 1.0
    assert batch.stats["lag/0"] == 4
    assert batch.stats["episodes/tokens"] == 2
    assert batch.stats["episodes/turns"] == 1
    assert 0 <= batch.stats["sampler/busy"] <= 1
    assert rig.worker.metrics_queue.get_nowait() == batch.stats
    assert rig.worker.stats().episodes >= 4
