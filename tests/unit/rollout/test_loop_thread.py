"""The event loop in a thread beside the trainer."""

import gc
import sys

from sparring.backend.rollout.loop import LoopThread


def test_the_interpreter_serves_the_loop_while_it_runs_and_is_as_before_afterwards():
    before = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    loop = LoopThread("test")
    loop.start()
    switch_s, (collect_after, *_), frozen = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    assert loop.stop(5.0)
    assert switch_s <= 0.001
    assert collect_after > before[1][0]
    assert frozen > before[2]
    assert (sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()) == before
