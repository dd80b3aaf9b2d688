"""What a configuration names is imported, or the error says what is missing."""

import json

import pytest

from sparring.errors import ConfigError
from sparring.plugins import load_attribute


def test_an_attribute_of_a_module_and_of_a_file(tmp_path):
    assert load_attribute("json:dumps", "agent.policy") is json.dumps
    (tmp_path / "mine.py").write_text("def make(): return 7\n")
    assert load_attribute(f"{tmp_path}/mine.py:make", "agent.policy")() == 7


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("json", "is not of the form"),
        (":x", "is not of the form"),
        ("json:nothing", "defines no 'nothing'"),
        ("no_such_module:x", "No module named"),
        ("nowhere.py:x", "there is no file"),
    ],
)
def test_what_is_missing_is_named(spec, expected):
    with pytest.raises(ConfigError, match=r"agent\.policy") as error:
        load_attribute(spec, "agent.policy")
    assert expected in str(error.value)


def test_a_file_with_an_error_in_it_says_which(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_attribute(f"{tmp_path}/broken.py:x", "objective.name")
