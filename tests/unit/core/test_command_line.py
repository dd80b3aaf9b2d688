"""What the command line says to those who spell it otherwise."""

import pytest

from sparring.cli import main


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
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_override(capsys, arguments, expected):
    error = refusal(capsys, *arguments)
    assert "unrecognized arguments" in error
    assert expected in error


def test_an_option_that_is_no_key_is_refused_without_a_guess(capsys):
    assert "KEY=VALUE:" not in refusal(capsys, "train", "x.yaml", "--frobnicate")
    assert "KEY=VALUE:" not in refusal(capsys, "view", "run", "--steps", "3")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["eval", "m", "--tempreture=1"], "--tempreture=1; did you mean --temperature?"),
        (["view", "run", "--limt", "3"], "--limt 3; did you mean --limit?"),
        (["train", "x.yaml", "--resune"], "--resune; did you mean --resume?"),
        (["view", "run", "episode", "more"], "unrecognized arguments: more\n"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(capsys, arguments, expected):
    assert expected in refusal(capsys, *arguments)


def test_overrides_are_optional_and_may_stand_behind_options(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "FILE [KEY=VALUE ...]" in capsys.readouterr().out
    config = tmp_path / "x.yaml"
    config.write_text("model: tiny-qwen3\nenv: sparring/KeyLookup-v0\n")
    assert main(["config", "show", str(config), "trainer.steps=2", "seed=5"]) == 0
    assert "override seed=5" in capsys.readouterr().out


def test_brackets_in_what_is_shown_are_no_markup(capsys, tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("model: a\nenv: sparring/Calculator-v0\n")
    overrides = ["model.path=a[/x]b", "trainer.report_to=[tensorboard]"]
    assert main(["config", "show", str(config), *overrides]) == 0
    said = capsys.readouterr().out
    assert "a[/x]b" in said
    assert "override trainer.report_to=[tensorboard]" in said
