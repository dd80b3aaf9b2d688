"""Evaluations and the start-up probe of the rollout worker, alone and beside training, over a scripted engine."""

from dataclasses import replace

import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.errors import BufferStateError, TrainerError
from sparring.types import EpisodeResult, Failure, StopReason

GREEDY = SamplingParams(max_new_tokens=1, temperature=0)
FIRST_HELD_OUT = "eval.1.0.v{}.0000.00.0"


def test_evaluation_is_stored_and_never_trained(make_rig):
    rig = make_rig()
    greedy = SamplingParams(max_new_tokens=1, temperature=0)
    played = rig.worker.evaluate(
        {"x/X-v0": ["test-3", "test-1", "test-2"]},
        split="test",
        sampling=greedy,
        version=0,
    )
    assert [t.task_id for t in played] == ["test-3", "test-1", "test-2"]
    assert {t.split for t in played} == {"test"}
    assert [t.action_tokens for t in played] == [1, 1, 1]  # by its own sampling
    rig.worker.start()
    rig.train(1, 2)
    again = rig.worker.evaluate({"x/X-v0": ["test-3"]}, split="test", sampling=greedy, version=2)
    assert [t.seed for t in again] == [played[0].seed]
    assert again[0].oldest_version == 2
    states = {e: state for e, (state, _) in rig.fates().items() if e.startswith("eval.")}
    assert list(states.values()) == ["evaluation"] * 4


def test_who_waits_for_an_evaluation_is_told_how_many_episodes_have_ended(make_rig, monkeypatch):
    monkeypatch.setattr("sparring.backend.rollout.loop._POLL_S", 0.01)
    held = FIRST_HELD_OUT.format(0)
    rig = make_rig(held={held})
    told = []

    def on_wait(finished, total):
        told.append((finished, total))
        if finished == 2:
            rig.release(held)

    tasks = {"x/X-v0": ["test-1", "test-2", "test-3"]}
    played = rig.worker.start_evaluation(tasks, split="test", sampling=GREEDY, version=0).result(on_wait)
    assert len(played) == 3
    assert told == sorted(told)
    assert (2, 3) in told


def test_a_probe_plays_no_episode_further_than_its_bound_and_samples_as_training_does(make_rig):
    rig = make_rig(turns=9, says=[2] * 100, max_length=2048)
    sampling = SamplingParams(max_new_tokens=100)
    tasks = {"x/X-v0": ["train-1", "train-2"]}
    probed = rig.worker.start_probe(tasks, sampling=sampling).result()
    assert [(t.usage.turns, t.action_tokens, t.split) for t in probed] == [(2, 128, "train")] * 2
    short = rig.worker.start_probe(tasks, sampling=replace(sampling, max_new_tokens=5)).result()
    assert [t.action_tokens for t in short] == [10, 10]
    evaluated = rig.worker.evaluate(tasks, split="train", sampling=sampling, version=0)
    assert [(t.usage.turns, t.action_tokens) for t in evaluated] == [(9, 900)] * 2


def test_the_trainer_goes_on_within_the_bound_while_an_evaluation_needs_the_weights(make_rig):
    rig = make_rig(config={"staleness": 2}, held={FIRST_HELD_OUT.format(1)})
    rig.worker.start()
    rig.train(1, 1)
    running = rig.worker.start_evaluation(
        {"x/X-v0": ["test-1", "test-2"]}, split="test", sampling=GREEDY, version=1, beside=True
    )
    batches = [rig.worker.next_batch(version, 10) for version in (1, 2, 3)]  # the weights of 1 stay live
    assert all(len(batch.groups) == 2 for batch in batches)
    assert batches[-1].stats["lag/max"] <= 2
    with pytest.raises(TrainerError, match=r"nothing that the engine samples: its weights are those of version 1"):
        rig.worker.next_batch(4, 10)
    assert not running.done()
    rig.release(FIRST_HELD_OUT.format(1))
    assert [t.oldest_version for t in running.result()] == [1, 1]
    rig.publish(4)
    assert rig.worker.next_batch(4, 10).step == 5


def test_an_evaluation_beside_training_leaves_it_most_of_the_engine(make_rig):
    names = {FIRST_HELD_OUT.format(0).replace("0000", f"{i:04}") for i in range(9)}
    rig = make_rig(config={"max_running_groups": 6, "group_size": 2}, held=names)
    tasks = {"x/X-v0": [f"test-{i}" for i in range(9)]}
    running = rig.worker.start_evaluation(tasks, split="test", sampling=GREEDY, version=0, beside=True)
    for name in sorted(names):
        assert len(rig.started) <= 3 + sum(gate.is_set() for gate in rig.gates.values())  # a quarter of 6 · 2 at once
        rig.release(name)
    assert len(running.result()) == 9


def test_an_evaluation_whose_weights_were_replaced_has_no_figures(make_rig):
    rig = make_rig()
    rig.worker.start()
    rig.train(1, 1)
    rig.publisher.publish(2, [])  # behind the worker's back
    with pytest.raises(TrainerError, match=r"evaluation of version 1 has tokens of version 2 \(eval\.1\.0\.v1"):
        rig.worker.evaluate({"x/X-v0": ["test-1"]}, split="test", sampling=GREEDY, version=1)


def test_stopping_ends_an_evaluation_that_nobody_waits_for(make_rig):
    rig = make_rig(held={FIRST_HELD_OUT.format(0)})
    running = rig.worker.start_evaluation({"x/X-v0": ["test-1"]}, split="test", sampling=GREEDY, version=0)
    rig.close()
    assert running.done()
    assert not rig.worker._player.abandoned


def test_a_buffer_that_fails_in_an_evaluation_says_what_happened(make_rig):
    rig = make_rig()
    rig.worker.start()
    rig.buffer.close()
    with pytest.raises(BufferStateError, match="is closed"):
        rig.worker.evaluate({"x/X-v0": ["test-1"]}, split="test", sampling=SamplingParams(), version=0)


def test_a_failed_evaluation_episode_is_tried_twice_and_reported(make_rig):
    rig = make_rig(play=lambda spec: EpisodeResult(StopReason.FAILED, failure=Failure("sandbox", "no such container")))
    (played,) = rig.worker.evaluate({"x/X-v0": ["test-1"]}, split="test", sampling=SamplingParams(), version=0)
    assert played.failed
    assert played.attempt == 1
    assert len(rig.fates()) == 2


def test_a_version_must_be_published_before_the_first_evaluation(make_rig):
    rig = make_rig()
    rig.worker.evaluate({"x/X-v0": ["test-1"]}, split="test", sampling=SamplingParams(), version=0)
    rig.worker.update_model_version(2)
    with pytest.raises(TrainerError, match="joined its buffer at version 0"):
        rig.worker.start()
