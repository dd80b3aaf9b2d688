"""A black box's program is looked at before the run begins: is it there, and does its Python have what it imports."""

import os
import sys

import pytest

from sparring.agents.blackbox import BlackBoxPolicy
from sparring.cli import main
from sparring.errors import ConfigError
from sparring.extras import install_command


def check(*command, **kwargs):
    BlackBoxPolicy(list(command), **kwargs).check_start()


@pytest.fixture
def script(tmp_path):
    def _script(text, name="agent.py"):
        (tmp_path / name).write_text(text)
        return name

    _script("", "beside.py")
    return _script


def test_a_program_that_is_there_is_taken(tmp_path):
    check("cat")
    check(sys.executable, "-m", "no_such_module")
    check(sys.executable, "-c", "import no_such_module")
    (tmp_path / "agent").write_text("#!/bin/sh\n")
    (tmp_path / "agent").chmod(0o755)
    check("./agent", cwd=tmp_path)


def test_a_program_that_is_not_there_is_named_with_where_it_was_looked_for(tmp_path):
    with pytest.raises(ConfigError, match="there is no program 'no-such-program' that can be run"):
        check("no-such-program")
    with pytest.raises(ConfigError, match=rf"no program '\.venv-x/bin/python' in {tmp_path} that"):
        check(".venv-x/bin/python", "agent.py", cwd=tmp_path)
    (tmp_path / "agent").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="no program"):  # it may not be executed
        check("./agent", cwd=tmp_path)
    with pytest.raises(ConfigError, match="no program 'cat'"):
        check("cat", environ={"PATH": str(tmp_path)})


def test_a_command_as_one_text_is_refused():
    with pytest.raises(ConfigError, match=r"as a list, such as \['{python}', agent\.py\]"):
        BlackBoxPolicy("python3 agent.py")


def test_a_script_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"there is no file {tmp_path}/agent.py"):
        check("{python}", "agent.py", cwd=tmp_path)


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("import json, no_such_a\nfrom no_such_b.c import d\nimport beside, no_such_a.b\n", "no_such_a, no_such_b"),
        ("import camelx\n", "camelx"),
    ],
)
def test_a_script_whose_python_lacks_what_it_imports_is_refused(script, tmp_path, text, lacks):
    with pytest.raises(ConfigError) as caught:
        check("{python}", script(text), cwd=tmp_path)
    assert str(caught.value) == (
        f"the black box's command: agent.py imports {lacks}, which {sys.executable} does not have"
    )


@pytest.mark.parametrize(
    "text",
    [
        "import json\nfrom beside import *\n",
        "try:\n    import no_such_a\nexcept ImportError:\n    pass\n",
        "def later():\n    import no_such_a\n",
        "import sys\nsys.path.insert(0, 'lib')\nimport no_such_a\n",
        "this is no Python of ours\n",
    ],
)
def test_a_script_that_may_well_run_is_taken(script, tmp_path, text):
    check("{python}", script(text), cwd=tmp_path)


def test_the_programs_own_variables_count(script, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_there.py").touch()
    name = script("import only_there\n")
    check("{python}", name, cwd=tmp_path, environ={"PYTHONPATH": str(tmp_path / "lib")})
    with pytest.raises(ConfigError, match="imports only_there"):
        check("{python}", name, cwd=tmp_path)


def test_a_run_is_refused_before_its_folder_is_made(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "bin"
    bare.mkdir()
    os.symlink(sys.executable, bare / "python3")  # without its packages: no pyvenv.cfg lies beside it
    script("from camel.agents import ChatAgent\n")
    (tmp_path / "x.yaml").write_text(
        "model: tiny-qwen3\nenv: sparring/KeyLookup-v0\nagent:\n  policy: sparring.agents.blackbox:BlackBoxPolicy\n"
        "  kwargs: {command: [bin/python3, agent.py]}\n"
    )
    assert main(["train", "x.yaml"]) == 2
    error = capsys.readouterr().err
    assert "agent.py imports camel, which bin/python3 does not have" in error
    assert install_command(["camel"], pip=f"{bare}/python3 -m pip") in error
    assert not (tmp_path / "runs").exists()
