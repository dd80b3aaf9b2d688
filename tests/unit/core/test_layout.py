"""The rooms install as sparring.*, and shadow nobody."""

import subprocess
import sys
from pathlib import Path

import pytest

from sparring.config_file import load_config

ROOT = Path(__file__).parents[3]


def run_python(code: str, cwd: Path) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_the_openai_agents_sdk_is_not_shadowed_from_the_repository_root():
    origin = run_python("import importlib.util; print(importlib.util.find_spec('agents').origin)", ROOT)
    assert "site-packages" in origin


def test_no_room_has_a_second_copy_in_src():
    links = {path.name: path.is_symlink() for path in (ROOT / "src/sparring").iterdir() if path.is_dir()}
    links.pop("__pycache__", None)
    assert links == {"agents": True, "backend": True, "envs": True, "sandbox": True}


@pytest.mark.slow
def test_neither_the_environments_nor_the_command_line_import_torch():
    code = (
        "import sys, sparring.envs, sparring.cli, sparring.backend, sparring.backend.gateway, sparring.sandbox;"
        "print([m for m in ('torch', 'transformers', 'docker', 'fastapi') if m in sys.modules])"
    )
    assert run_python(code, ROOT) == "[]"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_configuration(example):
    assert load_config(example).config.env.id.startswith("sparring/")
