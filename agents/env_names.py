"""What is meant by the name of an environment in somebody's own file: Gymnasium wants `my_env:mine/GuessNumber-v0`."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from pathlib import Path
from types import ModuleType

import gymnasium

from sparring.envs import ChatEnv
from sparring.errors import ConfigError
from sparring.plugins import load_module
from sparring.spelling import nearest

__all__ = ["refuse_file", "spelt_right"]

_KEY = "env.id"


def refuse_file(env_id: str) -> None:
    """
    Raises:
        ConfigError: the name is that of a file, as an agent's may be; with the module and the id to name instead.
    """
    source, separator, name = env_id.rpartition(":")
    file = source if separator else env_id
    if file.endswith(".py"):
        module = load_module(file, _KEY)
        raise ConfigError(
            f"{_KEY}={env_id!r} names a file, and an environment is named by the module and the id under which that "
            f"registers it{_advice(module, _dotted(Path(file)), name)}{_elsewhere(Path(file))}"
        )


def spelt_right(env_id: str) -> str:
    """How an error about an id that nothing registered goes on."""
    source, separator, name = env_id.rpartition(":")
    if separator:
        return _advice(sys.modules[source], source, name)
    if (file := Path(f"{env_id}.py")).is_file():
        return _advice(load_module(str(file), _KEY), env_id, name)
    namespaces = {spec.namespace for spec in gymnasium.registry.values()}
    if env_id.rpartition("/")[0] in namespaces - {None}:
        return ""  # Gymnasium has named the nearest
    return "; one in a file of yours is named with its module, as in my_env:mine/GuessNumber-v0"


def _advice(module: ModuleType, importable: str, name: str) -> str:
    """The ids that a module registers, that which is most like `name` first; or how to register one."""
    ids = _registered_by({module.__name__, importable})
    if ids:
        others = f"; it registers {', '.join(ids)}" if len(ids) > 1 else ""
        return f"; name it {importable}:{nearest(name, ids) or ids[0]}{others}"
    classes = [
        value.__name__
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ChatEnv) and value.__module__ == module.__name__
    ]
    made = name if name in classes else next(iter(classes), "MyEnv")
    line = f"gymnasium.register('mine/{made}-v0', entry_point={made})"
    return f"; it registers none: end the file with {line}, and name it {importable}:mine/{made}-v0"


def _registered_by(modules: Set[str]) -> Sequence[str]:
    def inside(entry: object) -> bool:
        module = entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", None)
        return module in modules

    return [spec.id for spec in gymnasium.registry.values() if inside(spec.entry_point)]


def _dotted(file: Path) -> str:
    """What to import the file by, from the current folder or, of a file elsewhere, from its own."""
    path = file.resolve().with_suffix("")
    return ".".join(path.relative_to(_here()).parts if path.is_relative_to(_here()) else (path.name,))


def _elsewhere(file: Path) -> str:
    folder = file.resolve().parent
    return "" if folder.is_relative_to(_here()) else f", with {folder} in PYTHONPATH"


def _here() -> Path:
    return Path.cwd().resolve()
