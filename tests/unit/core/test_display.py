"""What a run prints where there is no terminal, what it draws on one, and what it says while it waits for a batch."""

import io
import itertools
import re

import pytest
from rich.console import Console

from sparring.backend.rollout.stats import RolloutStats, SinceBatch
from sparring.config import RolloutConfig
from sparring.display import Display
from sparring.sampling_line import failure_line, sampling_line
from sparring.types import Failure


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_heading_comes_once_and_right_before_the_first_row():
    out = io.StringIO()
    with Display(2, Console(file=out, width=200)) as display:
        display.status("starting the engine and the trainer")
        display.step({"kind": "evaluation", "step": 0})
        display.step({"kind": "step", "step": 1, "reward": 0.25})
        display.status("evaluating")
        display.step({"kind": "step", "step": 2, "reward": 0.5})
    first, legend, heading, row, status, last = out.getvalue().splitlines()
    assert first == "starting the engine and the trainer"
    assert all(f"{name}: " in legend for name in ("lag", "busy", "ess"))
    assert heading.split()[:3] == ["step", "reward", "exact"]
    assert row.split()[:2] == ["1", "0.250"]
    assert status == "evaluating"
    assert last.split()[:2] == ["2", "0.500"]


def test_cells_end_where_their_headings_end_and_say_what_they_count():
    out = io.StringIO()
    with Display(1, Console(file=out, width=200)) as display:
        display.step({"kind": "step", "step": 1, "groups/dropped": 3.0, "failures": 5.0, "time/step_s": 12345.0})
    _, heading, row = out.getvalue().splitlines()
    assert len(row) == len(heading)
    assert re.findall(r"\w+ busy", heading) == ["sampler busy", "trainer busy"]
    for name, value in {"groups dropped": "3", "episodes failed": "5"}.items():
        assert row[: heading.index(name) + len(name)].endswith(f"  {value}")


def test_a_wait_is_told_within_seconds_then_ever_more_seldom_and_not_between_quick_steps():
    out, clock = io.StringIO(), Clock()
    with Display(9, Console(file=out, width=200), clock=clock) as display:

        def wait(seconds):
            shown = []
            for _ in range(2 * seconds):
                clock.now += 0.5
                before = len(out.getvalue())
                display.waiting("sampling")
                if out.getvalue()[before:] == "sampling\n":
                    shown.append(clock.now)
            return shown

        assert wait(120) == [105.5, 115.5, 135.5, 175.5]
        for step in range(3):
            display.step({"kind": "step", "step": step})
            assert wait(50) == []
        assert len(wait(70)) == 1


def test_on_a_terminal_a_wait_is_shown_as_long_as_it_lasts():
    clock = Clock()
    display = Display(9, Console(file=io.StringIO(), width=200, force_terminal=True), clock=clock)

    def bottom():
        with (console := Console(width=200)).capture() as capture:
            console.print(display._picture())
        return capture.get().splitlines()[-1]

    with display:
        display.status("starting")
        assert bottom() == "starting"
        display.waiting("sampling")
        assert bottom() == "sampling"
        clock.now += 3
        assert bottom() == "starting"


def test_an_evaluation_that_is_waited_for_is_counted_every_ten_seconds_and_after_steps_too():
    out, clock = io.StringIO(), Clock()
    with Display(9, Console(file=out, width=200), clock=clock) as display:
        for step in range(2):
            show = display.counting(f"evaluating at step {step}")
            for done in range(60):
                clock.now += 0.5
                show(done, 60)
            display.step({"kind": "step", "step": step})
    lines = out.getvalue().splitlines()
    assert "evaluating at step 0: 10 of 60 episodes, 6 s" in lines
    for step in range(2):
        first, *rest = [line for line in lines if line.startswith(f"evaluating at step {step}")]
        assert first == f"evaluating at step {step}"
        seconds = [0.0, *(float(line.split()[-2]) for line in rest)]
        assert seconds[-1] >= 20
        assert all(5 <= b - a <= 11 for a, b in itertools.pairwise(seconds))


def test_on_a_terminal_an_evaluation_s_count_is_one_line_that_is_drawn_anew():
    clock = Clock()
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with Display(9, console, clock=clock) as display:
        show = display.counting("evaluating")
        for done in (3, 4):
            clock.now += 0.5
            show(done, 60)
            with (shown := Console(width=200)).capture() as capture:
                shown.print(display._picture())
            assert capture.get().splitlines()[-1] == f"evaluating: {done} of 60 episodes, {0.5 * (done - 2):.0f} s"
            assert "3 of 60" not in capture.get() or done == 3


def stats(*, ready=0, **since):
    counts = {"episodes": 0, "failures": 0, "dropped_groups": 0, "equal_rewards": {}, "too_few": 0}
    counters = {"sampled_tokens": 0, "expired_groups": 0, "expired_episodes": 0, "failures": {}}
    return RolloutStats(
        version=0,
        running_groups=2,
        ready_groups=ready,
        running_episodes=16,
        episodes=0,
        dropped_groups=0,
        since_batch=SinceBatch(**(counts | since)),
        last_batch=SinceBatch(**counts),
        **counters,
    )


def test_what_a_step_waits_for_is_one_line():
    knobs = RolloutConfig(groups_per_step=4)
    assert sampling_line(stats(), knobs) == (
        "sampling for the next step: 0 episodes ended, 16 running; 0 of 4 groups ready"
    )
    since = {"episodes": 43, "failures": 9, "dropped_groups": 4, "equal_rewards": {0.0: 2}, "too_few": 1}
    assert sampling_line(stats(ready=1, **since), knobs) == (
        "sampling for the next step: 43 episodes ended, 9 of them failed, 16 running; 1 of 4 groups ready; "
        "dropped 2 for equal rewards, 1 for failures, 1 without a sampled token"
    )


def test_failures_are_told_with_the_commonest_reason():
    since = {"episodes": 43, "failures": 9, "alike": 7, "reason": Failure("deadline", "no end\x1b within x=5")}
    told = "9 of 43 episodes failed, 7 alike by deadline, such as: no end\\x1b within x=5"
    assert sampling_line(stats(**since), RolloutConfig()).splitlines()[1:] == [told]
    assert failure_line(stats(**since).since_batch) == told
    assert failure_line(stats().since_batch) == ""


@pytest.mark.parametrize(
    ("equal", "told"),
    [
        ({0.0: 3}, "every one of 3 groups had equal rewards: 0. "),
        ({1.0: 1, 0.0: 3}, "every one of 4 groups had equal rewards: 0 in 3, 1 in 1. "),
        ({0.1: 1, 0.2: 1, 0.3: 1, 0.4: 1}, "equal rewards: 0.1 in 1, 0.2 in 1, 0.3 in 1, .... "),
    ],
)
def test_groups_that_are_all_dropped_are_told_with_a_hint(equal, told):
    dropped = sum(equal.values())
    lines = sampling_line(stats(dropped_groups=dropped, equal_rewards=equal), RolloutConfig(max_refill=7)).splitlines()
    assert len(lines) == 2
    assert told in lines[1]
    assert "rollout.max_refill=7" in lines[1]


@pytest.mark.parametrize(
    "since",
    [
        {"dropped_groups": 2, "equal_rewards": {0.0: 2}},  # may be chance
        {"dropped_groups": 4, "equal_rewards": {0.0: 3}, "too_few": 1},  # not all for equal rewards
        {"dropped_groups": 9, "equal_rewards": {0.0: 9}, "ready": 1},  # one had signal
    ],
)
def test_there_is_no_hint_where_it_may_be_chance(since):
    assert "\n" not in sampling_line(stats(**since), RolloutConfig())


def test_the_time_left_goes_by_the_steps_so_far():
    out = io.StringIO()
    with Display(100, Console(file=out, width=200)) as display:
        display.step({"kind": "step", "step": 1, "time/step_s": 50.0})
        display.step({"kind": "step", "step": 2, "time/step_s": 30.0})
    assert [line.split()[-1] for line in out.getvalue().splitlines()[1:]] == ["left", "1:22:30", "1:05:20"]
