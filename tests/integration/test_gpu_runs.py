"""The runs of the GPU benchmarks, on random weights and a CPU: legs of one run are one run."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import gsm8k

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_in_legs_trains_each_step_once(noisy_config, tmp_path, tiny_qwen3, monkeypatch):
    evaluation = {"every": 4, "tasks": 4, "during_training": "stall"}  # beside training, one can be lost
    config = noisy_config(trainer={"steps": 8, "checkpoint_every": 0}, eval=evaluation)
    document = json.loads(config.read_text())
    config.write_text(json.dumps({key: value for key, value in document.items() if key != "run_dir"}))
    monkeypatch.setattr(gsm8k, "CONFIG", str(config))
    monkeypatch.setenv("SPARRING_BENCH_MODEL", str(tiny_qwen3))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "run_envs"))
    whole = gsm8k.run_command

    def first_step_alone(*arguments, **options):
        return whole(*arguments, **options, seconds_of_steps=1e-9)

    monkeypatch.setattr(gsm8k, "run_command", first_step_alone)
    with pytest.raises(gsm8k.Unfinished, match="steps are done"):
        gsm8k.measure(tmp_path / "logs")
    monkeypatch.setattr(gsm8k, "run_command", whole)
    _, found = gsm8k.measure(tmp_path / "logs")
    assert [step["step"] for step in found["steps"]] == [*range(1, 9)]
    assert [evaluation["step"] for evaluation in found["evaluations"]] == [0, 4, 8]
