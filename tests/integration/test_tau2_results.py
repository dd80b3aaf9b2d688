"""Results files: upstream reads ours and gives the same scores; its own, and ours, are scored again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tau2", reason="needs the extra tau2")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from sparring.envs.tau2 import GoldAgent, Tau2Env, UserSide
from sparring.envs.tau2.results import read_results, rescore, results, simulation, write_results
from sparring.envs.tau2.transcript import Entry
from sparring.errors import EngineError, SparringError, TaskError
from sparring.types import StopReason

ROOT = Path(__file__).parents[2]
NOBODY = {"implementation": "scripted", "llm": None, "llm_args": None}
INFO = {"num_trials": 1, "max_steps": 200, "max_errors": 10, "seed": 300, "agent": NOBODY, "user": NOBODY}


async def play(env: Tau2Env, task_id: str, *, gold: bool) -> dict[str, Any]:
    started = datetime.now()
    await env.areset(seed=0, options={"task_id": task_id})
    agent = GoldAgent(env.task)
    while not env.done:
        await env.astep(agent.next_message() if gold else "I am sorry.")
    return simulation(env, started=started, finished=datetime.now(), seed=0)


async def written(path: Path, domain: str, count: int) -> Any:
    """A results file of `count` tasks, every second of which goes unsolved."""
    env = Tau2Env(domain=domain)
    runs = [await play(env, task, gold=i % 2 == 0) for i, task in enumerate(env.task_ids("base")[:count])]
    write_results(path, results(env.domain, runs, **INFO))
    return read_results(path)


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "count"), [("mock", 9), ("airline", 2), ("retail", 2), ("telecom", 8)])
async def test_upstreams_evaluator_agrees_with_what_we_wrote(tmp_path: Path, domain: str, count: int) -> None:
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
    from tau2.metrics.agent_metrics import compute_metrics
    from tau2.utils.display import ConsoleDisplay

    read = await written(tmp_path / "results.json", domain, count)
    tasks = {task.id: task for task in read.tasks}
    for run in read.simulations:
        ours = run.reward_info.model_dump(mode="json")
        try:
            info = evaluate_simulation(run, tasks[run.task_id], EvaluationType.ALL, False, domain)
        except ValueError:  # an assertion about a record that does not exist: upstream gives up, and scores 0
            assert ours["reward"] == 0.0
            assert ours["info"]["error"] == "ValueError"
            continue
        theirs = info.model_dump(mode="json")
        for key in ("reward", "reward_basis", "reward_breakdown", "db_check", "env_assertions", "action_checks"):
            assert (ours[key] or None) == (theirs[key] or None), (run.task_id, key)
        said = [[check["met"] for check in info["communicate_checks"] or []] for info in (ours, theirs)]
        assert said[0] == said[1]
    solved = sum(run.reward_info.reward for run in read.simulations)
    assert compute_metrics(read).pass_hat_ks[1] == pytest.approx(solved / count)
    ConsoleDisplay.display_simulation(read.simulations[0], show_details=True)  # upstream's viewer


@pytest.mark.parametrize("domain", ["mock", "retail", "telecom"])
async def test_a_file_scores_again_as_it_did(tmp_path: Path, domain: str) -> None:
    read = await written(tmp_path / "results.json", domain, 6)
    verdicts = rescore(read)
    assert [verdict.reward for verdict in verdicts] == [run.reward_info.reward for run in read.simulations]
    assert {verdict.reward for verdict in verdicts} == {0.0, 1.0}


async def test_a_call_that_now_answers_otherwise_is_an_error_as_upstream_makes_it(tmp_path: Path) -> None:
    read = await written(tmp_path / "results.json", "mock", 1)
    answer = next(message for message in read.simulations[0].messages if message.role == "tool")
    answer.content = '{"task_id": "task_9"}'
    (verdict,) = rescore(read)
    assert (verdict.reward, verdict.error) == (0.0, "ValueError")
    assert "does not replay" in verdict.note


async def test_premature_ends_score_nothing_again(tmp_path: Path) -> None:
    env = Tau2Env(domain="mock")
    await env.areset(seed=0, options={"task_id": "base/create_task_1"})
    env.truncate(StopReason.MAX_TURNS)
    run = simulation(env, started=datetime.now(), finished=datetime.now())
    assert run["termination_reason"] == "max_steps"
    write_results(tmp_path / "r.json", results(env.domain, [run], **INFO))
    assert [verdict.reward for verdict in rescore(read_results(tmp_path / "r.json"))] == [0.0]


async def test_a_failed_episode_is_written_as_skipped() -> None:
    async def user(side: UserSide) -> Entry:
        if len(side.messages) == 1:
            return Entry("user", "Hello.")
        raise EngineError("gone")

    env = Tau2Env(domain="mock", user=user)
    run = await play(env, "base/create_task_1", gold=False)
    assert run["skipped"]
    assert run["termination_reason"] == "user_error"


async def test_a_running_conversation_is_refused() -> None:
    env = Tau2Env(domain="mock")
    await env.areset(seed=0)
    with pytest.raises(TaskError, match="not over"):
        simulation(env, started=datetime.now(), finished=datetime.now())


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json"])
def test_what_is_no_results_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(SparringError, match=r"r\.json cannot be read"):
        read_results(path)
    with pytest.raises(SparringError, match="missing"):
        read_results(tmp_path / "missing.json")


def benchmark(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tau2", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_benchmark_scores_gold_and_nothing_resumes_and_scores_again(tmp_path: Path) -> None:
    out = str(tmp_path / "gold")
    table = benchmark("--domain", "retail", "--agent", "gold", "--user", "scripted", "--out", out, "--trials", "2")
    assert "114 x 2" in table
    assert table.count("1.000 [0.967, 1.000]") == 2
    assert "published: GPT-4.1" in table
    again = benchmark("--domain", "retail", "--agent", "gold", "--out", out, "--trials", "2")
    assert "228 conversations from" in again
    assert "0 to play" in again
    path = tmp_path / "gold" / "retail.json"
    document = json.loads(path.read_text())
    document["simulations"] = document["simulations"][:100]
    path.write_text(json.dumps(document))
    assert "128 to play" in benchmark("--domain", "retail", "--agent", "gold", "--out", out, "--trials", "2")
    assert "228 conversations scored again, 0 rewards differ" in benchmark("--rescore", str(path))
    nothing = benchmark("--domain", "airline,telecom", "--agent", "nop", "--out", str(tmp_path / "nop"))
    assert "0.380 [0.259, 0.518]" in nothing  # 19 of 50
    assert "0.000 [0.000, 0.033]" in nothing


@pytest.mark.slow
def test_solo_conversations_score_again_too(tmp_path: Path) -> None:
    benchmark("--domain", "telecom", "--agent", "gold", "--solo", "--out", str(tmp_path), "--tasks", "20")
    assert "20 conversations scored again, 0 rewards differ" in benchmark("--rescore", str(tmp_path / "telecom.json"))


@pytest.mark.slow
def test_an_agent_whose_endpoint_is_gone_counts_in_no_score_and_is_played_again(tmp_path: Path) -> None:
    command = ["--domain", "mock", "--model", "any", "--base-url", "http://127.0.0.1:9/v1", "--tasks", "1"]
    table = benchmark(*command, "--out", str(tmp_path))
    assert "the agent's endpoint failed: APIConnectionError" in table
    (run,) = json.loads((tmp_path / "mock.json").read_text())["simulations"]
    assert (run["skipped"], run["termination_reason"], run["reward_info"]["reward"]) == (True, "agent_error", 0.0)
    assert "0 conversations" not in table
    assert "the agent's endpoint failed" in benchmark(*command, "--out", str(tmp_path))
