"""Objects that a configuration names: `module:attribute`, or `file.py:attribute`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from sparring.errors import ConfigError

__all__ = ["load_attribute"]


def load_attribute(spec: str, key: str) -> Any:
    """Import what `spec` names; `key` is the configuration key, for the error.

    Raises:
        ConfigError: not of that form, no such file, module or attribute, or the code raises when it is imported.
    """
    source, separator, attribute = spec.rpartition(":")
    if not separator or not source or not attribute:
        raise ConfigError(f"{key}={spec!r} is not of the form 'module:name' or 'file.py:name'")
    try:
        module = _load_file(Path(source), key) if source.endswith(".py") else importlib.import_module(source)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{key}={spec!r}: importing {source} failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ConfigError(f"{key}={spec!r}: {source} defines no {attribute!r}; it defines {names}") from None


def _load_file(path: Path, key: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
