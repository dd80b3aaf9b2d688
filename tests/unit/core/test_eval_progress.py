"""The lines of an evaluation that goes on: what failed for good and what is played again are counted apart."""

import io

from rich.console import Console

from sparring.eval_display import EvalProgress
from sparring.evaluation import EvalEpisode


def episode(reward):
    return EvalEpisode("e", "test/0", reward, solved=reward == 1.0, turns=1, messages=())


def test_episodes_with_an_attempt_left_are_neither_played_nor_failed():
    out = io.StringIO()
    with EvalProgress(Console(file=out, width=160), "mine/X-v0", [None] * 4, 0) as progress:
        progress.show([episode(1.0), None, None, None], 2)
        progress.show([episode(1.0), episode(None), episode(0.0), episode(1.0)], 0)
    first, last = filter(None, out.getvalue().splitlines())
    assert first.startswith("mine/X-v0: 1 solved of 1/4 played, 2 to be played again, ")
    assert last.startswith("mine/X-v0: 2 solved, 1 failed of 4/4 played")
