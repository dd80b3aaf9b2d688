"""The example that moves a TRL script over: same functions, same data, same rewards, and the run trains."""

import json
import runpy
from pathlib import Path

import pytest

from sparring.agents.runner import make_env
from sparring.cli import main
from sparring.config_file import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/trl_move"


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(ROOT)
    return load_config(EXAMPLE / "train.yaml").config


def test_the_example_is_ten_lines():
    lines = (EXAMPLE / "train.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= 10


async def test_rewards_are_what_the_functions_give_to_a_batch_as_trl_calls_them(config):
    """TRL calls each function with the whole batch, `reward_weights` times its scores are summed."""
    functions = runpy.run_path(str(EXAMPLE / "rewards.py"))
    rows = [json.loads(line) for line in (EXAMPLE / "sums.jsonl").read_text().splitlines()][:4]
    said = [f"It is {rows[0]['answer']}", "I do not know", "", f"{rows[3]['answer']} or 99"]
    completions = [[{"role": "assistant", "content": text}] for text in said]
    columns = {"prompts": [row["prompt"] for row in rows], "answer": [row["answer"] for row in rows]}
    correct = functions["correct"](completions=completions, completion_ids=[[1]] * 4, **columns)
    brief = await functions["brief"](completions=completions, completion_ids=[[1]] * 4, **columns)
    env = make_env(config.env.id, config.env.kwargs)
    for index, text in enumerate(said):
        await env.areset(options={"task_id": f"train/{index}"})
        await env.astep(text)
        assert env.reward == pytest.approx(1.0 * correct[index] + 0.2 * brief[index])
    assert correct == [1.0, 0.0, 0.0, 0.0]
    await env.aclose()


@pytest.mark.slow
def test_the_example_trains(config, tmp_path):
    tiny = (
        "model=tiny-qwen3 model.max_length=128 sampling.max_new_tokens=8 "
        "rollout.group_size=4 rollout.groups_per_step=2 trainer.steps=2 eval.tasks=2 "
        f"engine.dtype=float32 trainer.dtype=float32 run_dir={tmp_path}/run"
    )
    status = main(["train", str(EXAMPLE / "train.yaml"), *tiny.split()])
    assert status == 0
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2]
    assert 0 < steps[0]["reward/brief"] <= 1
