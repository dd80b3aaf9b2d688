"""The event loop in a thread beside the trainer."""

import sys

from sparring.backend.rollout.loop import LoopThread


def test_threads_hand_the_interpreter_over_more_often_while_the_loop_runs():
    before = sys.getswitchinterval()
    loop = LoopThread("test")
    loop.start()
    during = sys.getswitchinterval()
    assert loop.stop(5.0)
    assert during <= 0.001
    assert sys.getswitchinterval() == before
