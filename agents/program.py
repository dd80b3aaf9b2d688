"""What can be told of a program before it is run: that it is there, and that a Python script finds what it imports."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparring.errors import ConfigError
from sparring.extras import EXTRAS, install_command

__all__ = ["check_program"]

_TIMEOUT_S = 60.0
_FIND = (
    "import importlib.util, sys; sys.path[0] = sys.argv[1]; "
    "print(*[name for name in sys.argv[2:] if importlib.util.find_spec(name) is None])"
)


def check_program(command: Sequence[str], environ: Mapping[str, str], cwd: str | Path | None, key: str) -> None:
    """
    Args:
        key: names the command in errors.

    Raises:
        ConfigError: there is no such program, or it is a Python that lacks the script or what the script imports.
    """
    here = Path(cwd or ".").absolute()
    name = command[0]
    program = shutil.which(str(here / name) if os.sep in name else name, path=environ.get("PATH"))
    if program is None:
        where = f" in {here}" if os.sep in name and not os.path.isabs(name) else ""
        raise ConfigError(f"{key}: there is no program {name!r}{where} that can be run")
    if not (Path(name).name.startswith("python") and len(command) > 1 and command[1].endswith(".py")):
        return
    script = here / command[1]
    if not script.is_file():
        raise ConfigError(f"{key}: there is no file {script}")
    if absent := _absent(program, script, environ, here):
        extras = [extra for extra, modules in EXTRAS.items() if set(modules) & set(absent)]
        how = f": {install_command(extras, pip=f'{program} -m pip')}" if extras else ""
        raise ConfigError(f"{key}: {command[1]} imports {', '.join(absent)}, which {name} does not have{how}")


def _absent(program: str, script: Path, environ: Mapping[str, str], cwd: Path) -> list[str]:
    """Modules that the script imports before all else, and that its Python does not find."""
    modules = _imports(script)
    if not modules:
        return []
    find = [program, "-c", _FIND, str(script.resolve().parent), *modules]
    try:
        found = subprocess.run(find, env=dict(environ), cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} does not run: {error}") from error
    said = found.stdout.split()  # whatever else that Python prints as it starts
    return [module for module in modules if module in said]


def _imports(script: Path) -> list[str]:
    """Top-level modules that are imported without condition. None of a script that looks for them in its own way, or
    that this Python cannot read: such a one is taken at its word."""
    try:
        text = script.read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (OSError, ValueError, SyntaxError):
        return []
    if "sys.path" in text:
        return []
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return list(dict.fromkeys(name.partition(".")[0] for name in names))
