"""A whole run on two ranks, as torchrun starts them: the first samples and writes, the second trains along."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENVS = Path(__file__).parent / "run_envs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]


@pytest.fixture
def config(noisy_config):
    return noisy_config(trainer={"steps": 3, "checkpoint_every": 2})


def sparring(config: Path, *arguments: str, launcher: list[str] = TORCHRUN) -> tuple[int, str]:
    process = subprocess.Popen(
        [*launcher, "sparring.cli", "train", str(config), *arguments],
        env={**os.environ, "PYTHONPATH": str(ENVS)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_run_on_two_ranks_ends_with_a_model_and_goes_on_with_one(config, tmp_path, sharding):
    code, output = sparring(config, f"trainer.sharding={sharding}")
    assert code == 0, output[-3000:]
    run_dir = tmp_path / "run"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3]
    assert AutoModelForCausalLM.from_pretrained(run_dir / "model").num_parameters() > 0
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3
    code, output = sparring(config, "--resume", "trainer.steps=4", launcher=[sys.executable, "-m"])
    assert code == 0, output[-3000:]
    assert (run_dir / "checkpoint-4").is_dir()


def test_what_is_wrong_with_a_run_ends_both_ranks(config):
    code, output = sparring(config, "sampling.top_p=0.9")
    assert code != 0
    assert "sampling.top_p=0.9: a truncated sampling distribution" in output
