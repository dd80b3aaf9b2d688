"""What a configuration names is imported, or the error says what is missing."""

import json
import sys
import typing

import pytest

from sparring.errors import ConfigError
from sparring.plugins import call_factory, load_attribute


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


def test_the_folders_that_were_searched_for_a_module_are_named(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    (mine / "package_of_mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(mine), ""])
    for source in ("my_envv", "package_of_mine.my_envv"):
        with pytest.raises(ConfigError, match=rf"No module named '{source}'; it was sought in .*PYTHONPATH") as caught:
            load_attribute(f"{source}:x", "env.id")
        assert f"{mine}, {tmp_path}, and" in str(caught.value)
        assert "site-packages" not in str(caught.value)
        assert "lib/python" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("x = 1\n\n1 / 0\n", "ZeroDivisionError: division by zero (broken.py:3 in <module>)"),
        ("import json\n\njson.loads('{')\n", "column 2 (char 1) (broken.py:3 in <module>)"),
        ("def f():\n    return x\n\nf()\n", "NameError: name 'x' is not defined (broken.py:2 in f)"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' (broken.py:1 in <module>)"),
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax (broken.py:2)"),
        ("if True:\nx = 1\n", "IndentationError: expected an indented block after 'if' statement"),
    ],
)
def test_an_error_in_a_users_file_is_told_with_file_and_line(tmp_path, content, error):
    path = tmp_path / "broken.py"
    path.write_text(content)
    modules = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        load_attribute(f"{path}:x", "objective.name")
    assert str(caught.value).startswith(f"objective.name: importing {path} failed: ")
    assert error in str(caught.value)
    assert not [name for name in set(sys.modules) - modules if "broken" in name]


def test_an_error_in_a_module_that_the_file_imports_is_told_with_that_ones_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_mine.py").write_text("\n\nraise ValueError('no')\n")
    (tmp_path / "mine.py").write_text("import helper_of_mine\n")
    for source in (f"{tmp_path}/mine.py", "helper_of_mine"):
        with pytest.raises(ConfigError, match=r"ValueError: no \(helper_of_mine\.py:3 in <module>\)"):
            load_attribute(f"{source}:x", "agent.policy")


def test_a_factory_that_raises_is_told_with_file_and_line_and_one_that_is_called_wrongly_without(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def make(size):\n    return 1 / size\n")
    make = load_attribute(f"{path}:make", "agent.policy")
    assert call_factory(make, {"size": 2}, "agent.kwargs") == 0.5
    with pytest.raises(ConfigError, match=r"^agent\.kwargs: ZeroDivisionError: .* \(mine\.py:2 in make\)$"):
        call_factory(make, {"size": 0}, "agent.kwargs")
    with pytest.raises(ConfigError, match=r"^agent\.kwargs: make\(\) got an unexpected keyword argument 'sise'$"):
        call_factory(make, {"sise": 1}, "agent.kwargs")


def test_a_file_is_a_module_that_dataclasses_and_type_hints_find(tmp_path):
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    code = f"{head}class Q: pass\n@dataclass\nclass P:\n    q: Q\n"
    (tmp_path / "json.py").write_text(code)  # called like another module, which stays what it is
    made, of = (load_attribute(f"{tmp_path}/json.py:{name}", "agent.policy") for name in "PQ")
    assert [hint.__qualname__ for hint in typing.get_type_hints(made).values()] == [of.__qualname__]
    assert sys.modules["json"] is json
