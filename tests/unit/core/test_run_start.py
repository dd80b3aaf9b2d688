"""What a run says before it starts."""

from pathlib import Path

import pytest

from sparring.cli import main

ONE_PROCESS = "trainer.sharding=fsdp2: this run is one process, which holds everything"


@pytest.mark.parametrize(("sharding", "world", "told"), [("fsdp2", None, 1), ("fsdp2", "2", 0), ("none", None, 0)])
def test_one_process_that_is_to_share_its_weights_is_told_that_it_shares_none(
    sharding, world, told, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if world is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
    # No such environment, which is refused after that line and before anything starts.
    Path("x.yaml").write_text("model: tiny-qwen3\nenv: sparring/Nowhere-v0\n")
    assert main(["train", "x.yaml", f"trainer.sharding={sharding}"]) == 2
    out, error = capsys.readouterr()
    assert " ".join(out.split()).count(ONE_PROCESS) == told
    assert "Nowhere" in error
