"""`examples/tau2.yaml` trains: the embedded model on the mock domain, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tau2", reason="needs the extra tau2")
ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_example_trains_a_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparring.cli", "train", "examples/tau2.yaml"]
    overrides = [f"run_dir={tmp_path}/run", "trainer.steps=1", "eval.tasks=2"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("step") == 1 for line in lines)
    assert (tmp_path / "run" / "model" / "config.json").is_file()
