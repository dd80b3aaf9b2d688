"""Whole runs by the command line, on random weights: they end, resume, survive kill -9, and refuse what is wrong."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from sparring.backend.buffer import BufferView
from sparring.backend.models import make_tiny_model
from sparring.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENVS = Path(__file__).parent / "run_envs"
STEPS = 6


@pytest.fixture
def config(noisy_config):
    return noisy_config(trainer={"steps": STEPS, "checkpoint_every": 2})


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sparring.cli", "train", str(config), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ENVS)}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 200) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


def runs(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def run(config: Path, *arguments: str) -> tuple[int, str]:
    return finish(start(config, *arguments))


def step_records(run_dir: Path) -> list[dict]:
    metrics = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    return [record for record in records if record["kind"] == "step"]


def assert_each_trajectory_had_one_fate(run_dir: Path, steps: int) -> None:
    with BufferView(run_dir / "buffer.sqlite") as buffer:
        ledger = buffer.ledger()
    assert len({row.episode_id for row in ledger}) == len(ledger)
    groups_of_step: dict[int, set[str]] = {}
    for row in ledger:
        if row.state == "consumed":
            groups_of_step.setdefault(row.consumed_step, set()).add(row.group_id)
    assert sorted(groups_of_step) == list(range(1, steps + 1))
    uses = Counter(group for groups in groups_of_step.values() for group in groups)
    assert set(uses.values()) == {1}
    assert [record["step"] for record in step_records(run_dir)] == list(range(1, steps + 1))


def test_a_run_ends_with_its_files_and_its_bound_kept(config, tmp_path, capsys):
    status, output = run(config)
    assert status == 0, output
    directory = tmp_path / "run"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["max_lag"] <= summary["staleness"] == 2
    written = {path.name for path in (directory / "model").iterdir()}
    assert written >= {"model.safetensors", "chat_template.jinja", "tokenizer.json"}
    assert (directory / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "version lag was at most" in output
    assert_each_trajectory_had_one_fate(directory, STEPS)

    assert run(config)[0] == 2
    status, output = run(config, "--resume")
    assert status == 0
    assert "version lag was at most" in output

    assert main(["view", str(directory)]) == 0
    listed = capsys.readouterr().out
    episode = next(line.split()[0] for line in listed.splitlines() if " consumed " in line)
    assert main(["view", str(directory), episode, "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "mean ratio" in shown
    with BufferView(directory / "buffer.sqlite") as buffer:
        trajectory = buffer.trajectory(episode)
        trained = buffer.trained_logprobs(episode)
    assert trained is not None
    for sequence, logprobs in zip(trajectory.sequences, trained, strict=True):
        mask = sequence.action_mask
        assert abs(logprobs[mask] - sequence.behaviour_logprobs[mask]).mean() < 0.1


@pytest.mark.parametrize("mode", ["hold", "stall"])
def test_an_evaluation_during_training_is_of_one_version(config, tmp_path, mode):
    status, output = run(config, "eval.every=2", f"eval.during_training={mode}")
    assert status == 0, output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    evaluations = [r for r in map(json.loads, lines) if r["kind"] == "evaluation"]
    assert [r["step"] for r in evaluations] == [0, 2, 4, 6]
    beside = [r["steps_meanwhile"] for r in evaluations[1:-1]]
    assert all(1 <= n <= 3 for n in beside) if mode == "hold" else beside == [0, 0]
    with BufferView(tmp_path / "run" / "buffer.sqlite") as buffer:
        rows = buffer.episodes(state="evaluation", split="test", limit=-1)
        for row in rows:
            step = int(row.episode_id.split(".v")[1].split(".")[0])
            for sequence in buffer.trajectory(row.episode_id).sequences:
                assert set(sequence.policy_versions[sequence.action_mask].tolist()) <= {step}
    assert len(rows) == 4 * 4  # four tasks are held out


def test_episodes_that_no_resume_needs_are_pruned_where_the_run_says_so(config, tmp_path, capsys):
    status, output = run(config, "rollout.keep_steps=1")
    assert status == 0, output
    directory = tmp_path / "run"
    assert_each_trajectory_had_one_fate(directory, STEPS)
    with BufferView(directory / "buffer.sqlite") as buffer:
        consumed = {row.episode_id: row for row in buffer.episodes(state="consumed", limit=-1)}
    pruned = {row.consumed_step for row in consumed.values() if row.pruned}
    assert pruned == {1, 2}  # when step 6 was trained, a resume might have begun at checkpoint 2
    assert {row.consumed_step for row in consumed.values() if not row.pruned} == {3, 4, 5, 6}
    assert main(["view", str(directory), "--limit", "1000"]) == 0
    assert " consumed, pruned " in capsys.readouterr().out
    assert main(["view", str(directory), next(e for e, row in consumed.items() if row.pruned)]) == 0
    assert "pruned: its tokens and messages are forgotten" in capsys.readouterr().out
    assert run(config, "--resume", "trainer.steps=8", "rollout.keep_steps=1")[0] == 0
    assert_each_trajectory_had_one_fate(directory, 8)


def kill_at_random_moments(config: Path, run_dir: Path, kills: int, seed: int) -> None:
    """Kill -9 a run that would not end by itself, time and again; then it must go on, and be whole."""
    rng = random.Random(seed)
    busy = ("trainer.steps=10000", "eval.every=2", "rollout.keep_steps=0")  # evaluating and pruning all the while
    for kill in range(kills):
        resumed = (run_dir / "config.yaml").is_file()
        process = start(config, *(["--resume"] if resumed else []), *busy)
        if kill == kills - 1:
            await_step(process, run_dir, len(step_records(run_dir)) + 1)  # or a slow machine kills in starts alone
        time.sleep(rng.uniform(3, 14))  # the moment is the point of the test
        ended = process.poll()
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert ended is None, output
    steps = len(step_records(run_dir)) + 2
    status, output = run(config, "--resume", f"trainer.steps={steps}")
    assert status == 0, output
    assert_each_trajectory_had_one_fate(run_dir, steps)


def test_a_run_killed_before_its_first_checkpoint_goes_on(config, tmp_path):
    process = start(config, "trainer.checkpoint_every=0", "trainer.steps=200")
    await_step(process, tmp_path / "run", 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    status, output = run(config, "--resume", "trainer.steps=3")
    assert status == 0, output
    assert "no checkpoint yet: from the beginning" in output
    assert_each_trajectory_had_one_fate(tmp_path / "run", 3)


def test_kill_9_loses_and_repeats_nothing(config, tmp_path):
    kill_at_random_moments(config, tmp_path / "run", kills=3, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kill_9_at_20_random_moments(config, tmp_path):
    kill_at_random_moments(config, tmp_path / "run", kills=20, seed=2)


def test_ctrl_c_leaves_a_run_that_goes_on(config, tmp_path):
    process = start(config, "trainer.steps=400")
    await_step(process, tmp_path / "run", 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the engine's process gets it too
    status, output = finish(process, 90)
    assert status == 130, output
    assert "raised exception" not in output
    assert "--resume" in output
    done = len(step_records(tmp_path / "run"))
    status, output = run(config, "--resume", f"trainer.steps={done + 2}")
    assert status == 0, output
    assert_each_trajectory_had_one_fate(tmp_path / "run", done + 2)


def test_a_second_ctrl_c_ends_a_run_and_its_black_boxes_at_once_and_quietly(config, tmp_path):
    hangs = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(600)"
    agent = {"policy": "sparring.agents.blackbox:BlackBoxPolicy", "kwargs": {"command": ["{python}", "-c", hangs]}}
    process = start(config, f"agent={json.dumps(agent)}")
    try:
        while not (pids := [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        read = ""
        while "another Ctrl-C ends it at once\n" not in read:
            line = process.stdout.readline()
            assert line, read
            read += line
        os.killpg(process.pid, signal.SIGINT)
    finally:
        status, rest = finish(process, 10)
    assert (status, rest.strip()) == (130, "ended at once; --resume goes on with a run from its last checkpoint")
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, left


def test_a_run_says_why_episodes_fail_while_it_goes_on(config, tmp_path):
    status, output = run(config, "env.kwargs.broken=train/0", "env.kwargs.train_size=2", "trainer.steps=3")
    assert status == 0, output
    failed = {record["step"]: record["failures"] for record in step_records(tmp_path / "run") if record["failures"]}
    assert failed
    line = r"^step (\d+): (\d+) of \d+ episodes failed, .* by task, .*the service is down"
    told = dict(re.findall(line, output, re.MULTILINE))
    assert {int(step): float(count) for step, count in told.items()} == failed


def test_a_data_set_smaller_than_a_batch_wraps_around(config, tmp_path):
    status, output = run(config, "env.kwargs.train_size=1", "trainer.steps=2")
    assert status == 0, output
    assert_each_trajectory_had_one_fate(tmp_path / "run", 2)


def test_the_same_seed_repeats_a_synchronous_run_bit_for_bit(config, tmp_path):
    same = ["rollout.staleness=0", "engine.deterministic=true", "trainer.steps=3"]
    metrics = []
    for name in ("a", "b"):
        status, output = run(config, *same, f"run_dir={tmp_path}/{name}")
        assert status == 0, output
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        metrics.append([times_aside(json.loads(line)) for line in lines])
    assert [record["kind"] for record in metrics[0]] == ["evaluation", "step", "step", "step", "evaluation"]
    assert metrics[0] == metrics[1]


def test_a_killed_and_resumed_synchronous_run_ends_with_the_weights_of_an_uninterrupted_one(config, tmp_path):
    same = ["rollout.staleness=0", "engine.deterministic=true", "trainer.steps=4"]
    status, output = run(config, *same, f"run_dir={tmp_path}/whole")
    assert status == 0, output
    process = start(config, *same, f"run_dir={tmp_path}/killed")
    await_step(process, tmp_path / "killed", 3)  # the last checkpoint is of step 2: the third is trained anew
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    status, output = run(config, *same, f"run_dir={tmp_path}/killed", "--resume")
    assert status == 0, output
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


def await_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Until the run has written the metrics of a step."""
    deadline = time.monotonic() + 120
    while not ((path := run_dir / "metrics.jsonl").is_file() and f'"step": {step},' in path.read_text()):
        assert process.poll() is None, f"the run ended before step {step}"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)


def times_aside(record: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in record.items() if not k.startswith("time/") and not k.endswith(("per_s", "/busy"))}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trainer.learing_rate=1"], "trainer.learning_rate"),
        (["env.kwargs.train_size=0"], "has no task in its split"),
        (["env.id=sparring/Calculater-v0"], "Calculator"),
        (["model.max_length=20", "sampling.max_new_tokens=4"], "context of 20"),
        (["model.tool_template=null", "env=sparring/KeyLookup-v0"], "tool_template"),
        (["model=/nowhere"], "no Hugging Face folder"),
        (["sampling.top_p=0.9"], "biased"),
        (["objective=no_such"], "no_such"),
        (["engine.deterministic=true"], "rollout.staleness=0"),
        (["--resume"], "no run to resume"),
        (["run_dir=pyproject.toml"], "is a file"),
        (["run_dir=/proc/run"], "cannot write to /proc/run"),
    ],
)
def test_what_cannot_run_says_why(config, arguments, expected, monkeypatch, capfd):
    """In this process, which has imported it all: `test_a_model_without_a_chat_template_says_so` runs the program."""
    monkeypatch.syspath_prepend(ENVS)
    status = main(["train", str(config), *arguments])
    output = "".join(capfd.readouterr())
    assert status == 2, output
    assert "Traceback" not in output
    assert expected in output


def test_a_model_without_a_chat_template_says_so(config, tmp_path):
    make_tiny_model(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    status, output = run(config, f"model.path={tmp_path}/bare", "model.tool_template=null")
    assert status == 2, output
    assert "chat template" in output
