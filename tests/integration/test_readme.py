"""What the README shows runs as it stands there."""

import os
import re
import runpy
import tomllib
from pathlib import Path

import gymnasium
import pytest
import yaml
from gymnasium.utils.env_checker import check_env

from sparring.agents.blackbox import BlackBoxPolicy
from sparring.backend.gateway import ChatFormat
from sparring.backend.objectives import load_objective
from sparring.types import Message

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(marker: str, language: str = "python") -> str:
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.S) if marker in text]
    return found


@pytest.fixture
def written(tmp_path):
    def write(marker: str, name: str) -> Path:
        path = tmp_path / name
        path.write_text(block(marker))
        return path

    return write


def test_every_extra_is_named():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [extra for extra in extras if f"`{extra}`" not in README] == []


def test_the_first_program_makes_an_environment_and_steps_it(written, capsys):
    runpy.run_path(str(written("env.reset(seed=0)", "step.py")))
    printed = capsys.readouterr().out
    assert "calculator" in printed
    assert "24 0.4" in printed
    assert "'exact': 1.0" in printed


def test_the_environment_of_the_readme_is_a_whole_one(written):
    runpy.run_path(str(written("class GuessNumber", "my_env.py")))
    check_env(gymnasium.make("mine/GuessNumber-v0", disable_env_checker=True).unwrapped, skip_render_check=True)
    env = gymnasium.make("mine/GuessNumber-v0")
    env.reset(seed=3)
    observation, *_ = env.step('<tool_call>{"name": "is_larger", "arguments": {"than": 0}}</tool_call>')
    assert observation == "yes"
    observation, reward, terminated, *_ = env.step("It is 0")
    assert (observation, reward, terminated) == ("No. Go on.", 0.0, False)


def test_the_run_of_the_readme_shows_its_tool_to_the_model(written, tiny_qwen3):
    runpy.run_path(str(written("class GuessNumber", "my_env.py")))
    model = yaml.safe_load(block("my_env:mine/", "yaml"))["model"]
    chat = ChatFormat.load(tiny_qwen3, tool_template=model["tool_template"])
    tools = gymnasium.make("mine/GuessNumber-v0").unwrapped.toolbox.schemas
    assert "is_larger" in chat.decode(chat.encode_prompt([Message("user", "Find it.")], tools))


def test_the_black_box_of_the_readme_can_play(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", os.defpath)  # as where the virtual environment is not activated
    BlackBoxPolicy(**yaml.safe_load(block("BlackBoxPolicy", "yaml"))["agent"]["kwargs"]).check_start()


def test_the_objective_of_the_readme_loads(written):
    path = written("def success_only", "my_objective.py")
    assert load_objective(f"{path}:success_only", {"cap": 3.0}).name == "success_only"
