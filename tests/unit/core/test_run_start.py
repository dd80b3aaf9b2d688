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


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.learning_rate=1.0", "trainer.learning_rate (1e-06, now 1.0)"),
        ("rollout.group_size=9", "rollout.group_size (8, now 9)"),
        ("objective=gspo", 'objective.name ("default", now "gspo")'),
    ],
)
def test_a_resume_may_not_change_what_is_learnt(taken, override, told):
    with pytest.raises(ConfigError) as refused:
        RunDirectory.open(load_config("x.yaml", [override]), resume=True)
    assert f"began with another {told}: resume it as it was" in str(refused.value)


def test_a_runs_own_configuration_resumes_it_overrides_and_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model: tiny-qwen3\nenv: sparring/KeyLookup-v0\nrun_dir: runs/{name}\n")
    loaded = load_config("x.yaml", ["trainer.learning_rate=1.0"])
    RunDirectory.open(loaded, resume=False).claim(loaded)
    again = load_config("runs/x/config.yaml")
    assert RunDirectory.open(again, resume=True).root == Path("runs/x")
    assert again.config.trainer.learning_rate == 1.0


def test_a_refused_resume_tells_no_more_of_a_long_value_than_fits_a_line(taken):
    with pytest.raises(ConfigError) as refused:
        RunDirectory.open(load_config("x.yaml", [f"env.kwargs={{words: {['word'] * 999}}}"]), resume=True)
    assert "[...]" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.fixture
def begun(tmp_path, monkeypatch, capsys):
    """What a run printed that began on a processor which is slow in bfloat16, and came no further than its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparring.backend.compute_type.bfloat16_slowdown", lambda: 27.3)
    Path("x.yaml").write_text(
        "model: {path: tiny-qwen3, tool_template: hermes-compact, max_length: 256}\nenv: sparring/KeyLookup-v0\n"
        "engine: {device: cpu}\nsampling: {max_new_tokens: 64}\ntrainer: {device: cpu}\nrun_dir: run\n"
        "warm_start: {steps: 1, data: nowhere.jsonl}\n"
    )
    assert main(["train", "x.yaml"]) == 2
    out, error = capsys.readouterr()
    assert "nowhere.jsonl" in error
    return out


def test_a_run_says_that_the_machine_made_it_float32_and_writes_it_down(begun):
    assert "computing in float32, as this processor is slow in bfloat16 (27 times the time)" in begun
    config = load_config("run/config.yaml").config
    assert (config.engine.dtype, config.trainer.dtype) == ("float32", "float32")


def test_a_resume_on_another_machine_keeps_what_the_run_computes_in(begun, monkeypatch):
    monkeypatch.setattr("sparring.backend.compute_type.bfloat16_slowdown", lambda: 0.3)
    loaded = load_config("x.yaml")
    config = RunDirectory.open(loaded, resume=True).as_begun(loaded).config
    assert (config.engine.dtype, config.trainer.dtype) == ("float32", "float32")
    other = load_config("x.yaml", ["trainer.dtype=bfloat16"])
    with pytest.raises(ConfigError, match=r'another trainer\.dtype \("float32", now "bfloat16"\)'):
        RunDirectory.open(other, resume=True)


def test_every_knob_that_a_resume_may_change_is_one():
    known = {key for key, _, _ in load_config("examples/quickstart.yaml").lines()}
    assert known.issuperset(_FREE_KEYS)
