"""The event loop in a thread beside the trainer."""

import gc
import sys

from sparring.backend.rollout.loop import LoopThread


def interpreter():
    return sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()


def test_the_interpreter_serves_the_loop_while_it_runs_and_is_as_before_afterwards():
    before = interpreter()
    loop = LoopThread("test")
    loop.start()
    switch_s, (collect_after, *_), frozen = interpreter()
    assert loop.stop(5.0)
    assert switch_s <= 0.001
    assert collect_after > before[1][0]
    assert frozen > before[2]
    assert interpreter() == before


def test_the_interpreter_is_as_before_also_where_the_loop_had_ended_by_itself():
    before = interpreter()
    loop = LoopThread("test")
    loop.start()
    loop.call(loop._loop.stop)
    loop._thread.join(5.0)
    assert loop.stop(5.0)
    assert interpreter() == before
