"""Where a command writes what it makes: not over what stands there already, unless it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparring.errors import ConfigError

__all__ = ["check_new_file", "check_new_folder", "writing"]

_MARK_OF_A_MODEL = "config.json"


def check_new_file(out: Path, *, overwrite: bool) -> None:
    """Pipes and devices, such as /dev/stdout, are written to as they are.

    Raises:
        ConfigError: a file is there already.
    """
    if out.is_file() and not overwrite:
        raise ConfigError(f"--out: {out} exists already; choose another file, or add --overwrite")


def check_new_folder(out: Path, *, overwrite: bool, argument: str = "--out") -> None:
    """For a model's folder, which is replaced whole: so --overwrite holds for a model's folder, or an empty one, alone.

    Raises:
        ConfigError: something is there already.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise ConfigError(f"{argument}: {out} exists already; choose another folder, or add --overwrite")
    if out.is_symlink() or not out.is_dir():
        raise ConfigError(f"{argument}: {out} is no folder, so --overwrite does not replace it; choose another one")
    if any(out.iterdir()) and not (out / _MARK_OF_A_MODEL).is_file():
        raise ConfigError(
            f"{argument}: {out} holds no model (no {_MARK_OF_A_MODEL}), so --overwrite does not replace it; "
            "choose another folder"
        )


@contextmanager
def writing(out: Path, *, argument: str = "--out") -> Iterator[None]:
    """
    Raises:
        ConfigError: what is written inside cannot be, and why.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{argument}: cannot write {out}: {error.strerror or error}") from error
