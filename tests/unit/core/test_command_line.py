"""What the command line says to those who spell it otherwise."""

import pytest

from sparring.cli import main
from sparring.config_file import explain_keys, load_config


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "x.yaml", "--steps", "3"], "trainer.steps=3 or warm_start.steps=3"),
        (["train", "x.yaml", "--steps=3"], "trainer.steps=3 or warm_start.steps=3"),
        (["train", "--group-size", "4", "x.yaml"], "set as KEY=VALUE: rollout.group_size=4"),
        (["config", "show", "x.yaml", "--seed", "1", "--resume"], "set as KEY=VALUE: seed=1"),
        (["train", "x.yaml", "trainer.steps=2", "--max_turns", "5"], "rollout.max_turns=5"),
        (["train", "x.yaml", "--lr", "1e-5"], "KEY=VALUE: trainer.learning_rate=1e-5 or warm_start.learning_rate=1e-5"),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_override(capsys, arguments, expected):
    error = refusal(capsys, *arguments)
    assert "there is no option --" in error
    assert expected in error


def test_an_option_that_is_no_key_is_refused_without_a_guess(capsys):
    for arguments in (["train", "x.yaml", "--frobnicate"], ["view", "run", "--lr", "3"]):
        assert refusal(capsys, *arguments).endswith(f"; `sparring {arguments[0]} --help` lists them\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["eval", "m", "--tempreture=1"], "--tempreture; did you mean --temperature?"),
        (["view", "run", "--limt", "3"], "--limt; did you mean --limit?"),
        (["train", "x.yaml", "--resune"], "--resune; did you mean --resume?"),
        (["train", "x.yaml", "-resume"], "-resume; did you mean --resume?"),
        (["sft", "r", "--out", "x", "--min_reward", "1"], "--min_reward; did you mean --min-reward?"),
        (["view", "run", "episode", "more"], "unrecognized arguments: more\n"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(capsys, arguments, expected):
    assert expected in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "x.yaml", "--resum"], "--resume"),
        (["train", "x.yaml", "--resum", "trainer.steps=2"], "--resume"),
        (["eval", "m", "--temp", "1"], "--temperature"),
        (["eval", "m", "--env-", "x"], "--env-arg"),
        (["sft", "r", "--out", "x", "--min", "1"], "--min-reward"),  # rather than that it is missing
        (["serve", "inference", "x.yaml", "--po=1"], "--port"),
        (["--vers"], "--version"),
    ],
)
def test_an_option_is_not_abbreviated_in_silence(capsys, arguments, meant):
    assert refusal(capsys, *arguments).endswith(f"; did you mean {meant}?\n")


def test_what_is_no_option_is_taken_as_it_is(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sft", "r", "--out", "x", "--min-reward", "-1"]) == 2
    assert "r is no run folder" in capsys.readouterr().err
    assert main(["train", "--", "--resum"]) == 2
    assert "cannot read the configuration --resum" in capsys.readouterr().err


def test_a_missing_file_is_missed_alone(capsys):
    assert refusal(capsys, "train", "--resume").endswith("required: FILE\n")


def test_overrides_are_optional_and_may_stand_behind_options(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "FILE [KEY=VALUE ...]" in capsys.readouterr().out
    config = tmp_path / "x.yaml"
    config.write_text("model: tiny-qwen3\nenv: sparring/KeyLookup-v0\n")
    assert main(["config", "show", str(config), "trainer.steps=2", "seed=5"]) == 0
    assert "override seed=5" in capsys.readouterr().out


def test_every_knob_that_is_shown_is_explained_and_each_has_a_meaning(tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("model: tiny-qwen3\nenv: sparring/KeyLookup-v0\n")
    shown = {key for key, _, _ in load_config(config, ["trainer.lora={}"]).lines()}
    explained = {key: meaning for key, _, meaning in explain_keys()}
    assert explained.keys() == shown | {"trainer.lora"}
    assert [key for key, meaning in explained.items() if not meaning] == []


def test_one_knob_or_a_section_is_explained_alone_and_a_misspelt_one_is_answered(capsys):
    assert main(["config", "explain", "rollout.staleness"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said == (
        "key default meaning rollout.staleness 2 most updates between sampling and training (η); 0 is synchronous"
    )
    assert main(["config", "explain", "model."]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:2] == ["model.path", "required"]
    assert main(["config", "explain", "rolout.staleness"]) == 2
    assert "did you mean rollout.staleness?" in capsys.readouterr().err


def test_brackets_in_what_is_shown_are_no_markup(capsys, tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("model: a\nenv: sparring/Calculator-v0\n")
    overrides = ["model.path=a[/x]b", "trainer.report_to=[tensorboard]"]
    assert main(["config", "show", str(config), *overrides]) == 0
    said = capsys.readouterr().out
    assert "a[/x]b" in said
    assert "override trainer.report_to=[tensorboard]" in said
