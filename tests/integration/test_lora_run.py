"""A run by the command line that trains an adapter alone, after a warm start: engine, files, resume, evaluation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENVS = Path(__file__).parent / "run_envs"


def sparring(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sparring.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ENVS)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_trains_an_adapter_and_every_folder_it_leaves_is_a_model(tmp_path, noisy_config):
    said = [{"role": "user", "content": "Say something."}, {"role": "assistant", "content": "abc"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    lora = {"rank": 4, "alpha": 8, "dropout": 0.1}
    config = noisy_config(
        rollout={"staleness": 0},
        trainer={"steps": 2, "learning_rate": 1e-2, "checkpoint_every": 2, "lora": lora},
        warm_start={"steps": 5, "data": str(tmp_path / "chats.jsonl"), "learning_rate": 1e-2},
    )
    sparring("train", str(config))
    run = tmp_path / "run"
    warm, trained = (load_file(run / name / "adapter_model.safetensors") for name in ("warm_start", "checkpoint-2"))
    assert len(warm) == 2 * 4 * 7
    assert any((warm[name] != trained[name]).any() for name in warm)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2]
    # The engine sampled with the adapter that the trainer has: under version 0 the warm start's, then the trained one.
    assert all(record["drift/max/lag0"] < 1e-3 for record in steps)

    sparring("train", str(config), "--resume", "trainer.steps=3")
    went_on = load_file(run / "adapter" / "adapter_model.safetensors")
    assert any((went_on[name] != trained[name]).any() for name in trained)
    for model in (run / "model", run / "checkpoint-3"):
        assert "Noisy" in sparring("eval", str(model), "--episodes", "2")
