"""A run on several environments: groups by weight, one evaluation over all, figures for each."""

import json

import pytest

from sparring.backend.buffer import BufferView
from sparring.cli import main


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_a_mixture_with_a_curriculum(tmp_path, tiny_qwen3, monkeypatch):
    monkeypatch.syspath_prepend("tests/integration/run_envs")
    config = tmp_path / "mix.yaml"
    noisy = "noisy_env:test/Noisy-v0"
    document = {
        "model": {"path": str(tiny_qwen3), "tool_template": "hermes-compact", "max_length": 160},
        "env": {"mixture": [{"id": noisy, "weight": 2}, {"id": noisy, "kwargs": {"broken": "test"}}]},
        "engine": {"dtype": "float32"},
        "sampling": {"max_new_tokens": 6},
        "rollout": {"group_size": 3, "groups_per_step": 3, "staleness": 0, "max_running_groups": 3, "max_turns": 2,
                    "curriculum": True},
        "trainer": {"steps": 2, "dtype": "float32"},
        "eval": {"every": 0, "tasks": 2},
        "run_dir": str(tmp_path / "run"),
    }  # fmt: skip
    config.write_text(json.dumps(document))
    assert main(["train", str(config)]) == 0
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record[f"env/{noisy}/episodes"] for record in steps] == [6, 6]
    assert [record[f"env/{noisy}(broken='test')/episodes"] for record in steps] == [3, 3]
    evaluated = [record for record in records if record["kind"] == "evaluation"]
    assert [(record["episodes"], record["failed"]) for record in evaluated] == [(2, 2), (2, 2)]
    assert all({name for name in record if name.startswith("env/")} == {f"env/{noisy}/success"} for record in evaluated)
    with BufferView(tmp_path / "run/buffer.sqlite") as buffer:
        assert {row.env_id for row in buffer.episodes()} == {noisy, f"{noisy}(broken='test')"}
