"""Publishing weights: decoding goes on afterwards, whatever happened."""

import asyncio

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
