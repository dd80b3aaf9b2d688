"""What `sparring view` and a run's last lines say of its episodes, and of those that failed."""

import json

import pytest
from rich.console import Console

from sparring.backend.buffer import GroupSpec, TrajectoryBuffer
from sparring.cli import main
from sparring.report import print_report
from sparring.run_dir import RunDirectory
from sparring.types import Failure, StopReason, Trajectory

BUG = "KeyError: 'oops' (my_env.py:31 in _submit)"


@pytest.fixture
def run(tmp_path):
    """Three groups of two: of each one episode finished, the other died of the same bug; then one of another."""
    directory = RunDirectory(tmp_path)
    buffer = TrajectoryBuffer.open(directory.buffer)
    buffer.begin(0)
    for seq in range(3):
        group = GroupSpec(seq, f"g{seq}", "mine/X-v0", f"train/{seq}", seed=seq, size=2)
        buffer.start_group(group)
        buffer.store(_episode(group.episode(0), None))
        for attempt in range(1 + (seq == 2)):
            spec = group.episode(1, attempt)
            buffer.store(_episode(spec, f"task {spec.task_id}: {'[gone]' if attempt else BUG}"))
    buffer.close()
    return directory


def _episode(spec, failure):
    return Trajectory(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        env_id=spec.env_id,
        task_id=spec.task_id,
        seed=spec.seed,
        attempt=spec.attempt,
        sequences=(),
        reward=None if failure else 1.0,
        stop_reason=StopReason.FAILED if failure else StopReason.FINISHED,
        failure=Failure("internal", failure) if failure else None,
    )


def shown(capsys, *arguments: str) -> str:
    assert main(["view", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_list_says_what_failed_episodes_failed_of(run, capsys):
    text = shown(capsys, str(run.root))
    assert "failure" in text
    assert text.count("KeyError: 'oops'") == 3
    assert "[gone]" in text


def test_a_list_without_failures_has_no_column_for_them(run, capsys):
    assert "failure" not in shown(capsys, str(run.root), "--state", "pending")


def test_a_cut_list_says_so_and_a_whole_one_how_long_it_is(run, capsys):
    assert shown(capsys, str(run.root), "--limit", "2").endswith("2 of 7 episodes, the newest; --limit N, --state NAME")
    assert shown(capsys, str(run.root)).endswith("7 episodes")
    assert shown(capsys, str(run.root), "--state", "failed").endswith("4 failed episodes")
    assert shown(capsys, str(run.root), "--state", "expired") == "no expired episodes yet"


def test_a_state_that_is_none_is_refused_with_those_there_are(run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["view", str(run.root), "--state", "nonsense"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(state in error for state in ("nonsense", "consumed", "failed", "evaluation"))


def test_a_runs_report_names_the_commonest_failure_and_where_the_others_are(run):
    evaluation = {"step": 0, "episodes": 1, "failed": 0, "success": 1.0, "low": 0.0, "high": 1.0, "reward": 1.0}
    summary = {
        **{"steps": 1, "train_s": 1.0, "wall_s": 1.0, "staleness": 1, "max_lag": 0, "episodes": 7, "failures": 4},
        **{"before": evaluation, "after": evaluation, "conversation": {}},
    }
    run.summary.write_text(json.dumps(summary))
    console = Console(width=160)
    with console.capture() as capture:
        print_report(console, run)
    lines = capture.get().splitlines()
    assert lines[-2].startswith("3 of the last 4 failed by internal, such as: task train/")
    assert lines[-2].endswith(BUG)
    assert lines[-1].endswith(f"sparring view {run.root} --state failed")
