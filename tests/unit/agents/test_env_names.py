"""Whoever names an environment of a file as an agent of a file is named, or by its class, is told the right name."""

import sys

import gymnasium
import pytest

from sparring.agents.runner import make_env
from sparring.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.*Overriding environment")  # once by file, once by module

ENV = """
import gymnasium
from sparring.envs.key_lookup import KeyLookup
class Mine(KeyLookup): pass
"""
REGISTERED = f"{ENV}gymnasium.register('mine_{{name}}/Mine-v0', entry_point=Mine)\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files as a user has them, in the current folder; what they register is forgotten afterwards."""
    before = dict(gymnasium.registry), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "env_of_mine.py").write_text(REGISTERED.format(name="a"))
    two = "gymnasium.register('mine_b/Other-v0', entry_point=Mine)\n"
    (tmp_path / "two_of_mine.py").write_text(REGISTERED.format(name="b") + two)
    (tmp_path / "none_of_mine.py").write_text(ENV)
    text = "gymnasium.register('mine_d/Mine-v0', entry_point='text_of_mine:Mine')\n"
    (tmp_path / "text_of_mine.py").write_text(ENV + text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "deep_of_mine.py").write_text(REGISTERED.format(name="c"))
    (tmp_path / "here").mkdir()
    yield tmp_path
    gymnasium.registry.clear()
    gymnasium.registry.update(before[0])
    for name in set(sys.modules) - before[1]:
        if "of_mine" in name:
            del sys.modules[name]


def refused(env_id):
    with pytest.raises(ConfigError) as caught:
        make_env(env_id, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "right"),
    [
        ("env_of_mine.py:mine_a/Mine-v0", "env_of_mine:mine_a/Mine-v0"),
        ("env_of_mine.py:Mine", "env_of_mine:mine_a/Mine-v0"),
        ("./env_of_mine.py:Mine", "env_of_mine:mine_a/Mine-v0"),
        ("env_of_mine.py", "env_of_mine:mine_a/Mine-v0"),
        ("env_of_mine", "env_of_mine:mine_a/Mine-v0"),
        ("env_of_mine:Mine", "env_of_mine:mine_a/Mine-v0"),
        ("env_of_mine:mine_a/Mien-v0", "env_of_mine:mine_a/Mine-v0"),
        ("folder/deep_of_mine.py:Mine", "folder.deep_of_mine:mine_c/Mine-v0"),
        ("text_of_mine.py:Mine", "text_of_mine:mine_d/Mine-v0"),
        ("text_of_mine:Mine", "text_of_mine:mine_d/Mine-v0"),
        ("two_of_mine:mine_b/Othr-v0", "two_of_mine:mine_b/Other-v0; it registers mine_b/Mine-v0, mine_b/Other-v0"),
    ],
)
def test_the_right_name_is_told_and_works(files, env_id, right):
    assert refused(env_id).endswith(f"; name it {right}")
    assert type(make_env(right.partition(";")[0], {})).__name__ == "Mine"


@pytest.mark.parametrize("env_id", ["none_of_mine.py:Mine", "none_of_mine:Mine", "none_of_mine.py"])
def test_a_file_that_registers_nothing_is_told_how_to(files, env_id):
    assert refused(env_id).endswith(
        "; it registers none: end the file with gymnasium.register('mine/Mine-v0', entry_point=Mine), "
        "and name it none_of_mine:mine/Mine-v0"
    )


def test_a_file_elsewhere_is_told_with_its_folder(files, monkeypatch):
    monkeypatch.chdir(files / "here")
    assert refused("../env_of_mine.py:Mine").endswith(
        f"; name it env_of_mine:mine_a/Mine-v0, with {files} in PYTHONPATH"
    )


@pytest.mark.parametrize("env_id", ["mine_a/Mine-v0", "Mine", "env_of_mine.Mine"])
def test_an_id_that_no_imported_module_registers_needs_its_module(files, env_id):
    assert refused(env_id).endswith(
        "; one in a file of yours is named with its module, as in my_env:mine/GuessNumber-v0"
    )


def test_a_misspelt_id_of_ours_is_told_by_gymnasium_alone():
    assert refused("sparring/KeyLokup-v0").endswith("Did you mean: `KeyLookup`?")


def test_what_is_wrong_with_the_file_itself_comes_first(files):
    assert refused("nowhere.py:Mine") == "env.id: there is no file nowhere.py"
    (files / "broken_of_mine.py").write_text("1 / 0\n")
    assert "ZeroDivisionError: division by zero (broken_of_mine.py:1" in refused("broken_of_mine.py:Mine")
