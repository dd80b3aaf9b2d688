import json
from pathlib import Path

import pytest


@pytest.fixture
def noisy_config(tmp_path, tiny_qwen3):
    """Writes what whole runs are tested with: random weights, on an environment where those find signal."""

    def write(**sections: dict[str, object]) -> Path:
        """`sections` add to what stands there. The run is `run`, beside the file."""
        document: dict[str, dict[str, object]] = {
            "model": {"path": str(tiny_qwen3), "tool_template": "hermes-compact", "max_length": 160},
            "env": {"id": "noisy_env:test/Noisy-v0", "kwargs": {}},
            "engine": {"dtype": "float32", "slots": 16},
            "sampling": {"max_new_tokens": 8},
            "rollout": {"group_size": 4, "groups_per_step": 2, "max_running_groups": 4, "max_turns": 4},
            "trainer": {"learning_rate": 1e-4, "dtype": "float32"},
            "eval": {"every": 0, "tasks": 4},
        }
        for name, knobs in sections.items():
            document[name] = document.get(name, {}) | knobs
        path = tmp_path / "noisy.yaml"
        path.write_text(json.dumps({**document, "run_dir": str(tmp_path / "run")}))  # JSON is YAML
        return path

    return write
