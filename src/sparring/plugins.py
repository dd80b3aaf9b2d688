"""Objects that a configuration names: `module:attribute`, or `file.py:attribute`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from sparring.errors import ConfigError, SparringError, described
from sparring.extras import lacking

__all__ = ["call_factory", "check_file", "load_attribute", "load_module"]


def check_file(source: str, key: str) -> None:
    """Refuse at once a file of Python that is not there. A module is not looked for: that would import packages.

    Raises:
        ConfigError: there is none.
    """
    if source.endswith(".py") and not Path(source).is_file():
        raise ConfigError(f"{key}: there is no file {source}")


def load_attribute(spec: str, key: str) -> Any:
    """Import what `spec` names; `key` is the configuration key, for the error.

    Raises:
        ConfigError: not of that form, or no such attribute; or as `load_module`.
    """
    source, separator, attribute = spec.rpartition(":")
    if not separator or not source or not attribute:
        raise ConfigError(f"{key}={spec!r} is not of the form 'module:name' or 'file.py:name'")
    module = load_module(source, key)
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ConfigError(f"{key}={spec!r}: {source} defines no {attribute!r}; it defines {names}") from None


def load_module(source: str, key: str) -> ModuleType:
    """Import a module by its name, or run a file.

    Raises:
        ConfigError: there is none, or its code raises: then with the file, the line and the error.
    """
    check_file(source, key)
    try:
        return _run_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except SparringError:
        raise
    except Exception as error:  # whatever the user's code raises
        missing = isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}.")
        what = (lacking(error) or _not_found(error)) if missing else f"importing {source} failed: {described(error)}"
        raise ConfigError(f"{key}: {what}") from error


def _not_found(error: Exception) -> str:
    """With the folders that were searched for it, but for those of Python itself and of its packages."""
    given = dict.fromkeys(Path(folder).resolve() for folder in sys.path)
    folders = [str(f) for f in given if not any(f.is_relative_to(p) for p in (sys.prefix, sys.base_prefix))]
    places = ", ".join(["the installed packages", *folders])
    return f"{error}; it was sought in {places}, and PYTHONPATH may name more folders"


def call_factory(make: Callable[..., Any], kwargs: Mapping[str, Any], what: str) -> Any:
    """What a user's function makes of a configuration's arguments; `what` names them in the error.

    Raises:
        ConfigError: it does not take them, or its code raises: then with the file, the line and the error.
    """
    try:
        return make(**kwargs)
    except SparringError:
        raise
    except Exception as error:  # whatever the user's code raises
        inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        raise ConfigError(f"{what}: {described(error) if inside else error}") from error


def _run_file(path: Path) -> ModuleType:
    # A name that no other module has; registered, since dataclasses and type hints look their module up.
    spec = importlib.util.spec_from_file_location(f"{path.stem}@{path.resolve()}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
