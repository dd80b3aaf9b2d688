"""A package that is not there is told with the extra to install, wherever its lack is noticed."""

import json
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from sparring.cli import main
from sparring.errors import ConfigError, described
from sparring.extras import EXTRAS, install_command, installed, lacking, missing
from sparring.plugins import call_factory, load_attribute

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def hide(monkeypatch):
    def _hide(*modules):
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)  # importing it fails as if it were not installed

    return _hide


def _distributions(extra):
    names = (re.match(r"[\w.-]+", text)[0].lower() for text in PROJECT["optional-dependencies"][extra])
    return set(names) - {"sparring", "mcp"}  # an extra of ours; what camel needs an old one of


def test_every_package_of_an_extra_is_known_by_the_modules_that_it_brings():
    brings = {m: {n.lower().replace("_", "-") for n in names} for m, names in packages_distributions().items()}
    for extra, modules in EXTRAS.items():
        for module in {*modules} - {"safetensors"}:  # which transformers brings
            known = brings.get(module)
            assert known is None or known & _distributions(extra), f"{module} is of {known}, which {extra} lacks"
    of_extras = set().union(*EXTRAS.values())
    for distribution in set().union(*map(_distributions, EXTRAS)):
        modules = {module for module, names in brings.items() if distribution in names}
        assert not modules or modules & of_extras, f"the modules of {distribution} are not known: {modules}"


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    """As `wandb/`, where wandb logs to, or `agents/` in this project."""
    (tmp_path / "logs_of_a_service").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("logs_of_a_service")
    assert not installed("no_such_package")
    assert installed("json")


def test_what_is_missing_is_told_with_its_extra(hide):
    assert missing(["json"], "a run") is None
    hide("wandb", "docker")
    command = install_command(["report"])
    assert missing(["wandb"], "x") == f"x needs the package wandb, which is not installed: {command}"
    assert missing(["wandb", "numpy", "docker"], "x") == (
        f"x needs the packages wandb, docker, which are not installed: {install_command(['report', 'docker'])}"
    )


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'sparring[tau2,report]'"),
        ({"archive_info": {}, "url": "file://{folder}/sparring.whl"}, "pip install 'sparring[tau2,report]'"),
        ({"dir_info": {"editable": True}, "url": "file://{folder}"}, "pip install -e '{folder}[tau2,report]'"),
        ({"dir_info": {}, "url": "file://{folder}"}, "pip install '{folder}[tau2,report]'"),
        ({"dir_info": {"editable": True}, "url": "file:///gone"}, "pip install 'sparring[tau2,report]'"),
    ],
)
def test_an_extra_is_installed_from_where_sparring_came(tmp_path, monkeypatch, origin, command):
    folder = tmp_path / "a checkout"
    information = folder / "sparring-0.1.0.dist-info"
    information.mkdir(parents=True)
    if origin is not None:
        url = origin["url"].format(folder=str(folder).replace(" ", "%20"))
        (information / "direct_url.json").write_text(json.dumps({**origin, "url": url}))
    monkeypatch.syspath_prepend(folder)
    assert install_command(["tau2", "report"]) == command.format(folder=folder)
    monkeypatch.chdir(folder)
    assert install_command(["tau2", "report"]) == command.format(folder=".")


@pytest.mark.parametrize("error", [
    ModuleNotFoundError("No module named 'agents'", name="agents"),
    ModuleNotFoundError("No module named 'agents.exceptions'", name="agents.exceptions"),
    ImportError("cannot import name 'Agent' from 'agents' (unknown location)", name="agents"),
])  # fmt: skip
def test_an_import_that_found_a_folder_in_the_packages_place_is_told_as_its_lack(hide, error):
    assert lacking(error) is None  # it is installed: what failed is something else
    hide("agents")
    assert lacking(error) == "the package agents is not installed: " + install_command(["openai-agents"])
    assert described(error).endswith(install_command(["openai-agents"]))


def test_other_errors_are_told_as_they_are(hide):
    hide("camel")
    for error in (ValueError("camel"), ImportError("x"), ModuleNotFoundError("y", name="no_such_package")):
        assert lacking(error) is None


def test_a_policy_of_a_package_that_is_not_there_says_what_to_install(hide, tmp_path):
    hide("camel", "agents")
    with pytest.raises(ConfigError, match=r"agent\.policy: .* pip install .*\[camel\]' in a virtual env"):
        load_attribute("sparring.agents.camel:CamelPolicy", "agent.policy")
    with pytest.raises(ConfigError, match=r"^agent\.policy: the package camel is not installed: pip install"):
        load_attribute("camel.agents:ChatAgent", "agent.policy")
    (tmp_path / "mine.py").write_text("def make():\n    from agents import Agent\n")
    make = load_attribute(f"{tmp_path}/mine.py:make", "agent.policy")
    with pytest.raises(ConfigError, match=r"pip install .*\[openai-agents\]' \(mine\.py:2 in make\)"):
        call_factory(make, {}, "agent.kwargs")


@pytest.mark.parametrize(
    ("lacks", "arguments", "expected"),
    [
        (["torch", "trl"], ["train", "x.yaml"], "a run needs the packages torch, trl, which are not installed"),
        (["matplotlib"], ["train", "x.yaml"], "a run needs the package matplotlib, which is not installed"),
        (["torch"], ["eval", "m", "--env", "e"], "an evaluation needs the package torch"),
        (
            ["openai"],
            ["eval", "m", "--env", "e", "--base-url", "http://127.0.0.1:1"],
            "[gateway]'",
        ),
        (["aiohttp"], ["train", "x.yaml", "engine=vllm", "engine.urls=[http://a]"], "[vllm]'"),
        (["aiohttp"], ["serve", "inference", "x.yaml"], "sparring serve needs the package aiohttp"),
        (["fastapi", "torch"], ["serve", "inference", "x.yaml"], "sparring serve needs the packages fastapi, torch"),
        (["wandb"], ["train", "x.yaml", "trainer.report_to=[wandb]"], "[report]'"),
        (["bitsandbytes"], ["train", "x.yaml", "trainer.optimizer=adamw_8bit"], "[bitsandbytes]'"),
        (["peft"], ["train", "x.yaml", "trainer.lora={}"], "trainer.lora needs the package peft"),
    ],
)
def test_a_command_is_refused_in_one_line_before_anything_is_left(
    hide, tmp_path, monkeypatch, capsys, lacks, arguments, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("model: tiny-qwen3\nenv: sparring/KeyLookup-v0\n")
    hide(*lacks)
    before = set(sys.modules)
    assert main(arguments) == 2
    assert "torch" not in set(sys.modules) - before  # it would have been imported for nothing
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


def test_an_import_that_no_check_foresaw_is_one_line_too(hide, tmp_path, capsys):
    hide("torch")
    assert main(["import", "gguf", "a.gguf", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: the package torch is not installed: {install_command(['train'])}\n"
