"""What a run prints where there is no terminal: the heading stands right above the first row."""

import io

from rich.console import Console

from sparring.display import Display


def test_the_heading_comes_once_and_right_before_the_first_row():
    out = io.StringIO()
    with Display(2, Console(file=out, width=200)) as display:
        display.status("starting the engine and the trainer")
        display.step({"kind": "evaluation", "step": 0})
        display.step({"kind": "step", "step": 1, "reward": 0.25})
        display.status("evaluating")
        display.step({"kind": "step", "step": 2, "reward": 0.5})
    first, heading, row, status, last = out.getvalue().splitlines()
    assert first == "starting the engine and the trainer"
    assert heading.split()[:3] == ["step", "reward", "exact"]
    assert row.split()[:2] == ["1", "0.250"]
    assert status == "evaluating"
    assert last.split()[:2] == ["2", "0.500"]
