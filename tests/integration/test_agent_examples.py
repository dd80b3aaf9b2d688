"""Agents that somebody else wrote train: each example's configuration, made small, for one step on SmolLM2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.backend.buffer import BufferView

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]
SMALL = {
    "trainer.steps": 1,
    "rollout.group_size": 4,
    "rollout.groups_per_step": 1,
    "rollout.max_running_groups": 2,
    "rollout.episode_timeout_s": 240,
    "eval.tasks": 2,
    "engine.slots": 8,
}


@pytest.mark.parametrize("name", ["blackbox", "openai_agents", pytest.param("camel", marks=pytest.mark.camel)])
def test_an_example_trains_a_step(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = [f"{key}={value}" for key, value in SMALL.items()]
    command = [sys.executable, "-m", "sparring.cli", "train", f"examples/{name}.yaml", *overrides, f"run_dir={run_dir}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"CAMEL_LOGGING_DISABLED": "true"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Error getting response" not in done.stdout + done.stderr
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    [step] = [record for record in records if record["kind"] == "step"]
    assert step["step"] == 1
    assert (run_dir / "model" / "model.safetensors").is_file()
    with BufferView(run_dir / "buffer.sqlite") as buffer:
        rows = [row for row in buffer.ledger() if row.state == "consumed"]
        played = [buffer.trajectory(row.episode_id) for row in rows]
    assert len(played) == SMALL["rollout.group_size"]
    assert not [trajectory.failure for trajectory in played if trajectory.failed]
    # The agent's own program holds the conversation; not one of its turns was told apart from what was sampled.
    assert all(len(trajectory.sequences) == 1 and trajectory.action_tokens for trajectory in played)
