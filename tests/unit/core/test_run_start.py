"""What a run says before it starts."""

from pathlib import Path

import pytest

from sparring.cli import main
from sparring.config_file import load_config
from sparring.errors import ConfigError
from sparring.run_dir import _FREE_KEYS, RunDirectory

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


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """A configuration, and the folder of a run that began with it."""
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model: tiny-qwen3\nenv: sparring/KeyLookup-v0\nrun_dir: run\n")
    RunDirectory.open(load_config("x.yaml"), resume=False).claim(load_config("x.yaml"))


@pytest.mark.parametrize("override", ["trainer.token_budget=512", "engine.urls=[http://a]", "rollout.max_refill=99"])
def test_a_resume_may_change_what_is_not_learnt_from(taken, override):
    assert RunDirectory.open(load_config("x.yaml", [override]), resume=True).root == Path("run")


@pytest.mark.parametrize("override", ["trainer.learning_rate=1.0", "rollout.group_size=9", "objective=gspo"])
def test_a_resume_may_not_change_what_is_learnt(taken, override):
    with pytest.raises(ConfigError, match=f"began with another {override.partition('=')[0]}"):
        RunDirectory.open(load_config("x.yaml", [override]), resume=True)


def test_every_knob_that_a_resume_may_change_is_one():
    known = {key for key, _, _ in load_config("examples/quickstart.yaml").lines()}
    assert known.issuperset(_FREE_KEYS)
