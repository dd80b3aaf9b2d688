"""objectives.md, test 2: any number of data-parallel ranks gives the same gradient. Real processes over gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("trainer_process.py")


def run(ranks: int, model: Path, out: Path, objective: str = "default") -> dict:
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
        command = [sys.executable, str(SCRIPT), str(model), str(out), objective]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        for process in processes:
            output, _ = process.communicate(timeout=100)
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
