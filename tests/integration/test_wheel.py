"""The wheel holds every room as a real folder, and works in an empty environment."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_wheel_installs_and_plays_in_an_empty_environment(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("sparring-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {
        "sparring/envs/core.py",
        "sparring/agents/native.py",
        "sparring/backend/gateway/templates/hermes.jinja",
        "sparring/py.typed",
    }
    run(sys.executable, "-m", "venv", "empty", cwd=tmp_path)
    python = tmp_path / "empty/bin/python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    code = (
        "import gymnasium as gym, sparring; e = gym.make('sparring/Calculator-v0'); e.reset(seed=0);"
        """print(e.step('<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>')[0])"""
    )
    assert "5" in run(python, "-c", code, cwd=tmp_path)
    show = run(tmp_path / "empty/bin/sparring", "config", "show", ROOT / "examples/quickstart.yaml", cwd=tmp_path)
    assert "trainer.learning_rate" in show
