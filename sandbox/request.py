"""What may be asked of a sandbox: paths, arguments and variables that a model may have written, and their refusal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from sparring.errors import ConfigError, SandboxError

__all__ = ["SandboxRequestError", "check_argv", "check_env", "resolve_path"]

_LONGEST_PATH = 4096
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class SandboxRequestError(SandboxError):
    """The call is at fault, not the sandbox: a path outside the work folder, a missing file, a NUL byte, too much data.

    Tools answer the model with its message; an environment's own call that raises it has a bug.
    """


def check_argv(argv: Sequence[str]) -> None:
    """
    Raises:
        SandboxRequestError: an argument that no process can be given, or no program at all.
    """
    if not argv or any("\0" in argument or not _encodable(argument) for argument in argv):
        raise SandboxRequestError(f"a command needs a program, and no NUL or lone surrogate: {list(argv)!r:.200}")


def check_env(env: Mapping[str, str], error: type[SandboxError] | type[ConfigError] = SandboxRequestError) -> None:
    """
    Raises:
        error: a name or a value that no process can be given.
    """
    for name, value in env.items():
        if not _NAME.match(name) or "\0" in value or not _encodable(value):
            raise error(f"environment variable {name!r} has a bad name, or a NUL byte or lone surrogate in its value")


def resolve_path(path: str, *, workdir: str, scratch: str) -> str:
    """The absolute path that `path` names: relative to the work folder, which it may not leave but for `scratch`.

    A link inside the sandbox may lead anywhere in it; nothing of the host is there.

    Raises:
        SandboxRequestError: a NUL byte, or it leaves.
    """
    if "\0" in path or len(path) > _LONGEST_PATH or not _encodable(path):
        raise SandboxRequestError(f"a path has a NUL byte, a lone surrogate or more than {_LONGEST_PATH} characters")
    parts: list[str] = []
    for part in (PurePosixPath(workdir) / path).parts[1:]:
        if part == "..":
            if not parts:
                raise SandboxRequestError(f"path {path!r} leaves the file system")
            parts.pop()
        else:
            parts.append(part)
    absolute = PurePosixPath("/", *parts)
    if not any(absolute.is_relative_to(root) for root in (workdir, scratch)):
        raise SandboxRequestError(f"path {path!r} is outside {workdir} and {scratch}")
    return str(absolute)


def _encodable(text: str) -> bool:
    """Whether it can be an argument: models write lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
