"""objectives.md, test 2: any number of data-parallel ranks gives the same gradient, whether each holds the whole model
or a part of it. Real processes over gloo."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

SCRIPT = Path(__file__).with_name("trainer_process.py")


def start(ranks: int, model: Path, out: Path, **settings: object) -> list[subprocess.Popen]:
    return start_program(ranks, SCRIPT, model, out, json.dumps(settings))


def start_program(ranks: int, *command: object) -> list[subprocess.Popen]:
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
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen([sys.executable, *map(str, command)], env=env, **output))
    return processes


def outputs(processes: list[subprocess.Popen]) -> list[str]:
    """What each of them said until its end, within a deadline."""
    try:
        return [process.communicate(timeout=280)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(ranks: int, model: Path, out: Path, **settings: object) -> dict:
    processes = start(ranks, model, out, **settings)
    for process, output in zip(processes, outputs(processes), strict=True):
        assert process.returncode == 0, output[-3000:]
    return torch.load(out, weights_only=True)


def assert_same_step(many: dict, one: dict, *, gradient: float = 1e-6) -> None:
    largest = max(g.abs().max() for g in one["gradients"].values())
    assert largest > 0
    assert many["gradients"].keys() == one["gradients"].keys()
    for name, of_one in one["gradients"].items():
        assert (many["gradients"][name] - of_one).abs().max() <= gradient * largest, name
    for name in ("loss", "ess", "entropy", "kl/k3", "tokens/trained", "grad_norm"):
        assert many["record"][name] == pytest.approx(one["record"][name], rel=1e-5), name


@pytest.fixture(scope="module")
def one(tiny_qwen3, tmp_path_factory):
    return run(1, tiny_qwen3, tmp_path_factory.mktemp("one") / "one.pt", probe=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_objectives_2_any_number_of_ranks_gives_the_same_gradient(one, tiny_qwen3, tmp_path, ranks):
    many = run(ranks, tiny_qwen3, tmp_path / "many.pt")
    assert_same_step(many, one)
    assert many["record"]["keep_fraction"] == pytest.approx(one["record"]["keep_fraction"], rel=1e-5)


@pytest.mark.slow
def test_ranks_that_train_an_adapter_give_the_gradient_of_one(tiny_qwen3, tmp_path):
    settings = {"trainer": {"lora": {"rank": 4}}}
    one, two = (run(ranks, tiny_qwen3, tmp_path / f"{ranks}.pt", **settings) for ranks in (1, 2))
    assert len(one["gradients"]) == 2 * 4 * 7
    largest = max(g.abs().max() for g in one["gradients"].values())
    for name, gradient in one["gradients"].items():
        assert (two["gradients"][name] - gradient).abs().max() <= 1e-6 * largest, name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_hold_a_part_each_give_the_step_of_one(one, tiny_qwen3, tmp_path, ranks):
    parts = run(ranks, tiny_qwen3, tmp_path / "parts.pt", trainer={"sharding": "fsdp2"}, probe=True)
    assert_same_step(parts, one)
    torch.testing.assert_close(parts["weights"], one["weights"], rtol=0, atol=2e-6)
    torch.testing.assert_close(parts["published"], parts["weights"], rtol=0, atol=0)
    assert parts["drift"] == pytest.approx(one["drift"], rel=1e-5)
    for what in ("parameters", "moments"):
        assert parts["held"][what] <= one["held"][what] / ranks * 1.01, what


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"objective": {"name": "ppo"}},  # a critic on the policy's states, and values of it before the step
        {"objective": {"name": "decoupled_ppo"}},  # a pass without gradient first
        {"objective": {"name": "grpo", "kwargs": {"kl": "k3", "kl_coefficient": 0.1}}},  # another model beside it
        {"objective": {"name": "grpo", "kwargs": {"reward_kl": 0.01}}},  # which scores the batch first
        {"trainer": {"gradient_checkpointing": True}},
    ],
    ids=["critic", "proximal", "reference", "reward_kl", "checkpointing"],
)
def test_what_passes_beside_the_loss_works_in_parts_too(tiny_qwen3, tmp_path, settings):
    settings["trainer"] = {"steps": 2, **settings.get("trainer", {})}
    whole = run(1, tiny_qwen3, tmp_path / "whole.pt", **settings)
    settings["trainer"] |= {"sharding": "fsdp2"}
    parts = run(2, tiny_qwen3, tmp_path / "parts.pt", **settings)
    assert_same_step(parts, whole, gradient=1e-5)
    torch.testing.assert_close(parts["weights"], whole["weights"], rtol=0, atol=2e-6)
    for name, value in whole["record"].items():
        if name.startswith(("critic/", "kl/")):
            assert parts["record"][name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.slow
def test_parts_are_float32_where_bfloat16_computes(tiny_qwen3, tmp_path):
    knobs = {"dtype": "bfloat16", "steps": 2}
    whole = run(1, tiny_qwen3, tmp_path / "whole.pt", trainer=knobs)
    parts = run(2, tiny_qwen3, tmp_path / "parts.pt", trainer=knobs | {"sharding": "fsdp2"})
    assert {t.dtype for t in (*parts["published"].values(), *parts["gradients"].values())} == {torch.float32}
    assert any(not torch.equal(t.bfloat16().float(), t) for t in parts["published"].values())
    assert parts["record"]["loss"] == pytest.approx(whole["record"]["loss"], abs=0.02)
    assert parts["record"]["grad_norm"] == pytest.approx(whole["record"]["grad_norm"], rel=0.05)
    flat = [torch.cat([found["gradients"][n].flatten() for n in whole["gradients"]]) for found in (parts, whole)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.99


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((1, "none"), (2, "none"), marks=pytest.mark.long),
        pytest.param((2, "none"), (1, "none"), marks=pytest.mark.long),
        ((2, "fsdp2"), (4, "fsdp2")),
        pytest.param((2, "fsdp2"), (1, "fsdp2"), marks=pytest.mark.long),
        ((1, "none"), (2, "fsdp2")),
    ],
    ids=lambda who: f"{who[0]} {'in parts' if who[1] == 'fsdp2' else 'whole'}",
)
def test_a_run_resumes_on_another_number_of_ranks(tiny_qwen3, tmp_path, before, after):
    def steps(n: int, who: tuple[int, str], run_dir: str, *, resume: bool = False) -> dict:
        out = tmp_path / f"{run_dir}-{n}.pt"
        ranks, sharding = who
        knobs = {"steps": n, "learning_rate": 1e-3, "sharding": sharding}
        return run(ranks, tiny_qwen3, out, run_dir=str(tmp_path / run_dir), resume=resume, trainer=knobs)

    whole = steps(3, before, "whole")
    steps(2, before, "broken")
    files = (tmp_path / folder / "model.safetensors" for folder in ("broken/checkpoint-2", "whole/checkpoint-3"))
    assert len({tuple(safe_open(file, "pt").keys()) for file in files}) == 1
    resumed = steps(3, after, "broken", resume=True)
    assert resumed["record"]["step"] == 3
    assert resumed["record"]["loss"] == pytest.approx(whole["record"]["loss"], rel=1e-5)
    # A hundredth of an update: Adam makes much of rounding where a gradient is almost nothing.
    torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_rank_that_is_killed_ends_the_others_which_say_so(tiny_qwen3, tmp_path, sharding):
    knobs = {"steps": 50, "sharding": sharding, "checkpoint_every": 1}
    killed = {"signal": (signal.SIGKILL, 1, 3), "run_dir": str(tmp_path / "run")}
    others = start(3, tiny_qwen3, tmp_path / "out.pt", trainer=knobs, **killed)
    lost = others.pop(1)
    outputs([lost])
    assert lost.returncode == -signal.SIGKILL
    began = time.monotonic()
    for process, output in zip(others, outputs(others), strict=True):
        assert process.returncode == 1, output[-3000:]
        assert "TrainerError: another rank of this run is gone" in output
    assert time.monotonic() - began < 120  # on a loaded machine; the exchange itself would wait for half an hour
    assert sorted(f.name for f in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.slow
def test_ctrl_c_at_one_rank_stops_all_in_parts_at_the_same_step_with_a_checkpoint(tiny_qwen3, tmp_path):
    knobs = {"steps": 3, "learning_rate": 1e-3, "sharding": "fsdp2"}
    whole = run(2, tiny_qwen3, tmp_path / "whole.pt", trainer=knobs)
    run_dir = str(tmp_path / "broken")
    stopped = start(2, tiny_qwen3, tmp_path / "broken.pt", trainer=knobs, run_dir=run_dir, signal=(signal.SIGINT, 1, 2))
    for output in outputs(stopped):
        assert "KeyboardInterrupt" in output
    assert [f.name for f in (tmp_path / "broken").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = run(2, tiny_qwen3, tmp_path / "resumed.pt", trainer=knobs, run_dir=run_dir, resume=True)
    torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=0)


@pytest.mark.slow
def test_an_error_of_the_main_rank_reaches_all_ranks_whatever_it_is_made_of():
    ranks = start_program(2, Path(__file__).with_name("ranks_process.py"))
    main, other = ([json.loads(line) for line in out.splitlines() if line[:1] == "["] for out in outputs(ranks))
    assert [process.returncode for process in ranks] == [0, 0]
    assert main[0] == other[0] == ["EngineError", "sent as it is"]
    assert [kind for kind, _ in main[1:5]] == ["Unpicklable", "BudgetExhausted", "Garbled", "Strange"]
    for (kind, message), (other_kind, words) in zip(main[1:5], other[1:5], strict=True):
        assert other_kind == "TrainerError"
        assert words.startswith(f"the main rank failed: {kind}: {message} ("), words
    assert main[5] == other[5]
    assert "pickle" in main[5][1], "a value that cannot be sent is an error on all ranks too"
    assert main[6] == other[6] == [None, ["a value"]]
