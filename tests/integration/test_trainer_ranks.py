"""objectives.md, test 2: any number of data-parallel ranks gives the same gradient. Real processes over gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("trainer_process.py")


def run(ranks: int, model: Path, out: Path, **settings: object) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        if ranks > 1:
            env |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
            }  # fmt: skip
        command = [sys.executable, str(SCRIPT), str(model), str(out), json.dumps(settings)]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        for process in processes:
            output, _ = process.communicate(timeout=280)
            assert process.returncode == 0, output[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def one(tiny_qwen3, tmp_path_factory):
    return run(1, tiny_qwen3, tmp_path_factory.mktemp("one") / "one.pt")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_objectives_2_any_number_of_ranks_gives_the_same_gradient(one, tiny_qwen3, tmp_path, ranks):
    many = run(ranks, tiny_qwen3, tmp_path / "many.pt")
    largest = max(g.abs().max() for g in one["gradients"].values())
    assert largest > 0
    for name, gradient in one["gradients"].items():
        assert (many["gradients"][name] - gradient).abs().max() <= 1e-6 * largest, name
    for name in ("loss", "ess", "entropy", "kl/k3", "keep_fraction", "tokens/trained", "grad_norm"):
        assert many["record"][name] == pytest.approx(one["record"][name], rel=1e-5), name


@pytest.mark.slow
def test_ranks_that_train_an_adapter_give_the_gradient_of_one(tiny_qwen3, tmp_path):
    settings = {"trainer": {"lora": {"rank": 4}}}
    one, two = (run(ranks, tiny_qwen3, tmp_path / f"{ranks}.pt", **settings) for ranks in (1, 2))
    assert len(one["gradients"]) == 2 * 4 * 7
    largest = max(g.abs().max() for g in one["gradients"].values())
    for name, gradient in one["gradients"].items():
        assert (two["gradients"][name] - gradient).abs().max() <= 1e-6 * largest, name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_resumes_on_another_number_of_ranks(tiny_qwen3, tmp_path, before, after):
    def steps(n: int, ranks: int, run_dir: str, *, resume: bool = False) -> dict:
        out = tmp_path / f"{run_dir}-{n}.pt"
        knobs = {"steps": n, "learning_rate": 1e-3}
        return run(ranks, tiny_qwen3, out, run_dir=str(tmp_path / run_dir), resume=resume, trainer=knobs)

    whole = steps(3, before, "whole")
    steps(2, before, "broken")
    resumed = steps(3, after, "broken", resume=True)
    assert resumed["record"]["step"] == 3
    assert resumed["record"]["loss"] == pytest.approx(whole["record"]["loss"], rel=1e-5)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=2e-6)
