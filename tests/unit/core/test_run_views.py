"""What `sparring view` and a run's last lines say of its episodes, and of those that failed."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from sparring.backend.buffer import GroupSpec, TrajectoryBuffer
from sparring.cli import main
from sparring.evaluation import EvalEpisode, write_episodes
from sparring.fates import legend
from sparring.report import print_report, write_report
from sparring.run_dir import RunDirectory
from sparring.types import EPISODE_STATES, Failure, StopReason, TokenSequence, Trajectory, Turn

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
    fates = "episodes in all: 3 left in the buffer, 4 failed"
    cut = shown(capsys, str(run.root), "--limit", "2")
    assert cut.endswith(f"2 of 7 episodes, the newest; --limit N, --state NAME {fates}")
    assert shown(capsys, str(run.root)).endswith(f"7 episodes {fates}")
    assert shown(capsys, str(run.root), "--state", "failed").endswith("4 failed episodes")
    assert shown(capsys, str(run.root), "--state", "expired") == "no expired episodes yet"


def test_the_list_explains_the_states_that_occur_in_it_alone(run, capsys):
    buffer = TrajectoryBuffer.open(run.buffer)
    buffer.begin(0)
    buffer.drop_group("g0", "no signal")
    buffer.close()
    text = shown(capsys, str(run.root))
    assert all(f"{state}: " in text for state in ("pending", "dropped", "failed"))
    assert "dropped: not trained, as its group taught nothing" in text
    assert not any(f"{state}: " in text for state in ("consumed", "expired", "evaluation"))
    only = shown(capsys, str(run.root), "--state", "dropped")
    assert "dropped: not trained" in only
    assert "pending: " not in only


def test_an_episode_whose_last_answer_was_cut_says_so(run, capsys):
    assert "cut" not in shown(capsys, str(run.root))
    buffer = TrajectoryBuffer.open(run.buffer)
    buffer.begin(0)
    group = GroupSpec(3, "g3", "mine/X-v0", "train/3", seed=3, size=2)
    buffer.start_group(group)
    for member, reasons in enumerate([("stop", "length"), ("length", "stop")]):
        turns = tuple(Turn(i, i + 1, finish_reason=reason) for i, reason in enumerate(reasons))
        sequence = TokenSequence([1, 2], [True, True], [-1.0, -1.0], [0, 0], turns)
        buffer.store(replace(_episode(group.episode(member), None), sequences=(sequence,)))
    buffer.close()
    text = shown(capsys, str(run.root))
    assert text.count("finished, cut") == 1
    assert "cut: the last answer ended at sampling.max_new_tokens" in text
    cut, whole = (group.episode(member).episode_id for member in range(2))
    assert "finished, cut" in shown(capsys, str(run.root), cut)
    assert "finished, cut" not in shown(capsys, str(run.root), whole)


def test_every_state_of_an_episode_is_explained():
    assert [part.partition(": ")[0] for part in legend(EPISODE_STATES).split("; ")] == list(EPISODE_STATES)


def test_a_state_that_is_none_is_refused_with_those_there_are(run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["view", str(run.root), "--state", "nonsense"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(state in error for state in ("nonsense", "consumed", "failed", "evaluation"))


@pytest.fixture
def report(run):
    """The last lines of that run, had it been trained, with rewards at its steps' evaluations."""

    def _report(rewards, keep_best=0, dropped=0) -> list[str]:
        step = {"kind": "step", "step": 4, "reward": 0.2, "time/step_s": 1.0, "lag/max": 1}
        steps = [step | {"groups/dropped": float(dropped)}]
        evaluations = [{"kind": "evaluation", "step": step} for step in rewards]
        run.metrics.write_text("".join(json.dumps(record) + "\n" for record in [*steps, *evaluations]))
        for step, reward in rewards.items():
            message = {"role": "assistant", "content": "x"}
            solved = EvalEpisode("mine/X-v0", "test/0", reward, solved=reward >= 0.5, turns=1, messages=(message,))
            write_episodes(run.evaluation(step), [solved])
        write_report(run, "a run", staleness=1, keep_best=keep_best, wall_s=2.0)
        console = Console(width=160)
        with console.capture() as capture:
            print_report(console, run)
        return capture.get().splitlines()

    return _report


def test_a_runs_report_says_what_the_short_names_mean(report):
    metrics = report({0: 0.1, 4: 0.3})[-3]
    assert all(f"{name}, " in metrics for name in ("drift", "kl/k3"))


def test_a_runs_report_counts_episodes_as_the_other_commands_do(report):
    assert "episodes: 3 left in the buffer, 4 failed" in report({0: 0.1, 4: 0.3})


def test_a_runs_report_counts_groups_as_the_live_table_does_and_tells_what_that_left_out(run, report):
    buffer = TrajectoryBuffer.open(run.buffer)
    buffer.begin(0)
    buffer.drop_group("g0", "no signal")
    buffer.drop_group("g1", "failures")
    buffer.close()
    both = report({0: 0.1, 4: 0.3}, dropped=2)
    assert "episodes: 1 left in the buffer, 2 dropped, 4 failed" in both
    assert "groups: 1 cut short, 2 dropped" in both
    (line,) = [line for line in report({0: 0.1, 4: 0.3}, dropped=1) if line.startswith("groups")]
    assert line.endswith("2 dropped (1 of these after the last batch, or in steps that a resume repeated)")


def test_a_runs_report_names_the_checkpoints_that_were_kept_for_their_evaluations(run, report):
    for step in (2, 4, 6):
        run.checkpoint(step).mkdir()
    rewards = {0: 0.9, 2: 0.6, 4: 0.6, 5: 0.7, 6: 0.1}
    (line,) = [line for line in report(rewards, keep_best=3) if line.startswith("best")]
    assert line == (
        f"best of the evaluated checkpoints: {run.root}/checkpoint-2 (held-out reward 0.600, 100.0% solved), "
        f"{run.root}/checkpoint-4 (held-out reward 0.600, 100.0% solved)"
    )
    assert not [line for line in report(rewards) if line.startswith("best")]


def test_a_runs_report_names_the_commonest_failure_and_where_the_others_are(run, report):
    lines = report({0: 0.1, 4: 0.3})
    assert lines[-2].startswith("3 of the last 4 failed by internal, such as: task train/")
    assert lines[-2].endswith(BUG)
    assert lines[-1].endswith(f"sparring view {run.root} --state failed")
