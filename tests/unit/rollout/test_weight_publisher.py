"""Publishing weights: decoding goes on afterwards, whatever happened."""

import asyncio
import threading

import pytest

from sparring.errors import EngineError


def tensors(fail: bool = False):
    yield "a", None
    if fail:
        raise MemoryError("no room for b")
    yield "b", None


def test_versions_names_and_the_pause_are_recorded(make_rig):
    rig = make_rig()
    rig.publisher.init_weight_transfer()
    publication = rig.publisher.publish(3, tensors())
    assert publication.version == rig.engine.version == 3
    assert rig.engine.updates == [(3, ["a", "b"])]
    assert 0 < publication.paused_s < 5
    assert not rig.engine._paused


def test_trls_single_steps_count_versions_up(make_rig):
    rig = make_rig()
    rig.publisher.init_weight_transfer()
    rig.publisher.next_version = 5
    for _ in range(2):
        rig.publisher.pause()
        rig.publisher.send_weights(tensors())
        rig.publisher.resume()
    rig.publisher.destroy()
    assert [p.version for p in rig.publisher.publications] == [5, 6]


def test_a_failed_update_leaves_the_engine_decoding_with_the_old_weights(make_rig):
    rig = make_rig()
    rig.worker.start()
    rig.publish(0)
    with pytest.raises(EngineError, match=r"weights of version 1: MemoryError.*serves version 0"):
        rig.publisher.publish(1, tensors(fail=True))
    assert rig.engine.version == 0
    assert len(rig.worker.next_batch(0, 10).groups) == 2


def test_an_update_without_end_is_given_up(make_rig):
    rig = make_rig()
    rig.publisher.init_weight_transfer()
    rig.publisher._timeout_s = 0.05

    async def for_ever(version, source):
        await asyncio.Event().wait()

    rig.engine.update_weights = for_ever
    with pytest.raises(EngineError, match=r"no end after 0\.05 s"):
        rig.publisher.publish(1, tensors())
    assert not rig.engine._paused


def test_the_engine_starts_while_the_trainer_does_something_else(make_rig):
    rig = make_rig()
    begun, go_on = threading.Event(), threading.Event()
    start = rig.engine.start

    async def slow():
        begun.set()
        await asyncio.to_thread(go_on.wait, 5)
        await start()

    rig.engine.start = slow
    rig.publisher.init_weight_transfer()
    assert begun.wait(5)
    go_on.set()
    assert rig.publisher.publish(1, tensors()).version == rig.engine.version == 1


def test_an_engine_that_did_not_start_is_told_by_the_first_weights(make_rig):
    rig = make_rig()

    async def fail():
        raise EngineError("no such GPU")

    rig.engine.start = fail
    rig.publisher.init_weight_transfer()
    for _ in range(2):
        with pytest.raises(EngineError, match="no such GPU"):
            rig.publisher.publish(0, tensors())


def test_a_worker_that_is_stopped_ends_the_start_of_its_engine(make_rig):
    rig = make_rig()
    begun, ended = threading.Event(), []

    async def for_ever():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("start")

    async def stop():
        ended.append("stop")

    rig.engine.start, rig.engine.stop = for_ever, stop
    rig.worker.begin_opening()
    assert begun.wait(5)
    rig.worker.stop()
    assert ended == ["start", "stop"]
