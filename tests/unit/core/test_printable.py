"""Nothing that a model, a tool or an agent wrote moves the cursor of who reads of it."""

import io
import subprocess
import sys

import pytest

from sparring.backend.buffer import GroupSpec, StoredGroup, StoredTrajectory, TrajectoryBuffer
from sparring.backend.rollout.scheduler import _sample
from sparring.cli import main
from sparring.display import Display, open_console
from sparring.errors import TrainerError
from sparring.eval_display import print_results
from sparring.evaluation import EvalEpisode
from sparring.run_dir import RunDirectory
from sparring.transcript import printable, said
from sparring.types import Failure, Message, StopReason, ToolCall, Trajectory

CONTROL = "\x1b\x07\r\x08\x0b\x0c\x7f\x9b\x9d\x00\u202e\u202a\u2066\u2069"
HOSTILE = "<\x1b[2J\x1b]0;title\x07" + CONTROL + "[bold]>"


def is_clean(text: str) -> bool:
    return not set(CONTROL) & set(text)


def episode(spec, failure: str | None = None) -> Trajectory:
    messages = (Message("user", HOSTILE), Message("assistant", HOSTILE, (ToolCall("c", HOSTILE, HOSTILE),)))
    return Trajectory(
        spec.episode_id, spec.group_id, spec.env_id, spec.task_id, 0, (), None if failure else 1.0,
        StopReason.FAILED if failure else StopReason.FINISHED, messages=tuple(m.to_openai() for m in messages),
        failure=Failure("agent", failure) if failure else None, reward_parts={} if failure else {HOSTILE: 1.0},
    )  # fmt: skip


@pytest.fixture
def group():
    return GroupSpec(0, "g0", "x/X-v0", "train/0", seed=0, size=2)


@pytest.fixture
def trajectories(group):
    return episode(group.episode(0)), episode(group.episode(1), HOSTILE)


def test_control_characters_are_shown_as_escapes_and_lines_stay_lines():
    assert printable("a\x1b[31m\x9b\u202e\ud800\n\tü😀") == "a\\x1b[31m\\x9b\\u202e\\ud800\n\tü😀"
    assert printable(printable(HOSTILE)) == printable(HOSTILE)
    assert is_clean(said({"content": HOSTILE}))


def test_the_end_of_a_run_without_signal_quotes_conversation_and_failure_so(group, trajectories):
    text = _sample(StoredGroup(group, tuple(map(StoredTrajectory, trajectories))))
    assert "\\x1b[2J" in text
    assert "agent: <\\x1b" in text
    assert is_clean(text)


def test_the_views_of_a_run_show_them_so(group, trajectories, tmp_path, capsys):
    buffer = TrajectoryBuffer.open(RunDirectory(tmp_path).buffer)
    buffer.begin(0)
    buffer.start_group(group)
    for trajectory in trajectories:
        buffer.store(trajectory)
    buffer.close()
    for arguments in ([], *([t.episode_id] for t in trajectories)):
        assert main(["view", str(tmp_path), *arguments]) == 0
        shown = capsys.readouterr().out
        assert "\\x1b[2J" in shown
        assert is_clean(shown)


def test_what_a_run_and_an_evaluation_print_is_so(trajectories, capsys):
    console = open_console()
    with Display(1, console) as display:
        display.status(HOSTILE)
    print_results(console, {HOSTILE: [EvalEpisode.of(trajectories[1])]}, 1)
    shown = capsys.readouterr().out
    assert shown.count("\\x1b[2J") == 4  # the status, the environment twice, the failure
    assert is_clean(shown)


def test_a_terminal_gets_the_consoles_own_control_characters_and_no_others():
    console = open_console()
    console.file, console._force_terminal, console._color_system = io.StringIO(), True, None
    with Display(1, console) as display:
        display.status(HOSTILE)
    shown = console.file.getvalue()
    assert "\x1b[?25l" in shown  # it hides the cursor
    assert "\\x1b[2J" in shown
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)
    assert "\x1b[2J" not in shown
    assert "\x1b]0;" not in shown


def test_errors_and_warnings_of_a_command_are_so(capsys, monkeypatch):
    def fail(*_):
        raise TrainerError(HOSTILE)

    monkeypatch.setattr("sparring.cli._view", fail)
    assert main(["view", "run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: <\\x1b[2J")
    assert is_clean(error)


def test_a_bug_is_logged_so():
    code = f"""
import logging
from sparring.cli import main
try:
    main(["--version"])
except SystemExit:
    pass
try:
    raise ValueError({HOSTILE!r})
except ValueError:
    logging.getLogger("sparring.x").exception("episode %s died of a bug", {HOSTILE!r})
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).stderr.decode()
    assert told.startswith("episode <\\x1b[2J")
    assert "\nValueError: <\\x1b[2J" in told
    assert is_clean(told)
