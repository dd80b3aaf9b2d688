"""A name that there is not is answered with the nearest one, wherever it was misspelt."""

import time

import pytest

from sparring.cli import main
from sparring.spelling import did_you_mean, nearest


def test_the_nearest_name_is_named_and_nothing_where_none_is_near():
    assert nearest("trainr", ["train", "view"]) == "train"
    assert did_you_mean("trainr", ["train", "view"]) == "; did you mean train?"
    assert did_you_mean("qqq", ["train", "view"]) == ""
    assert did_you_mean("train", []) == ""


def test_a_name_that_was_cut_short_is_the_shortest_that_it_begins():
    known = ["tamp", "help", "temperature", "tem-long"]
    assert nearest("temp", known) == "tamp"
    assert nearest("temp", known, abbreviated=True) == "temperature"
    assert nearest("tem", known, abbreviated=True) == "tem-long"
    assert nearest("hlep", known, abbreviated=True) == "help"


def test_a_hostile_name_costs_no_time():
    began = time.perf_counter()
    assert did_you_mean("ab" * 1_000_000, ["search" * 10] * 50) == ""
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "'trian'; did you mean train? Choose from train, serve, config,"),
        (["evaluate", "model"], "'evaluate'; did you mean eval?"),
        (["qqq"], "'qqq'. Choose from train,"),
        (["serve", "inferense"], "'inferense'; did you mean inference?"),
        (["config", "shwo"], "'shwo'; did you mean show?"),
        (["import", "ggfu"], "'ggfu'; did you mean gguf?"),
        (["view", "run", "--state", "consumd"], "argument --state: there is no 'consumd'; did you mean consumed?"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_nearest(capsys, arguments, expected):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err
