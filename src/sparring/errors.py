"""One tree of errors, by boundary. Each message says what happened, to which episode or service, and what to do now."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType

from sparring.extras import lacking

__all__ = [
    "AgentError",
    "BudgetExhausted",
    "BufferStateError",
    "ConfigError",
    "EngineError",
    "GatewayError",
    "SandboxError",
    "SparringError",
    "TaskError",
    "TrainerError",
    "described",
    "first_error",
]


class SparringError(Exception):
    """Base of every error that sparring raises on purpose.

    Attributes:
        kind: the failure kind under which an episode that dies of it is stored and counted.
    """

    kind = "internal"


class ConfigError(SparringError):
    """A configuration file, an override or a constructor argument is wrong; nothing has started yet."""

    kind = "config"


class TaskError(SparringError):
    """A task or a data set cannot be used: missing, empty, malformed, or without an answer to score against."""

    kind = "task"


class SandboxError(SparringError):
    """A sandbox failed as infrastructure: it did not start, its daemon is gone, its deadline passed."""

    kind = "sandbox"


class AgentError(SparringError):
    """An agent's own code crashed, hung or broke its protocol, as against answering wrongly."""

    kind = "agent"


class EngineError(SparringError):
    """A sampling engine failed, or was asked for what it cannot do."""

    kind = "engine"


class GatewayError(SparringError):
    """A request to the gateway cannot be met.

    Attributes:
        status: the HTTP status under which the HTTP face reports it.
        param: the request field at fault, or None.
        code: what went wrong, in OpenAI's word for it, or None where that has none.
    """

    kind = "gateway"

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class BufferStateError(SparringError):
    """The trajectory buffer cannot keep its promise: disk full, file damaged, an episode stored or consumed twice."""

    kind = "buffer"


class TrainerError(SparringError):
    """Training cannot go on: no signal, numbers that are not finite, a checkpoint that does not fit."""

    kind = "trainer"


class BudgetExhausted(GatewayError):
    """An episode's turn or token budget ran out: a truncation, not a failure; it is rewarded and trained.

    Attributes:
        stop_reason: "max_turns" or "max_tokens".
    """

    def __init__(self, message: str, *, stop_reason: str) -> None:
        super().__init__(message, status=400, param="messages", code=stop_reason)
        self.stop_reason = stop_reason


def described(error: BaseException) -> str:
    """A bug in one line, with the place in its author's code: `KeyError: 'oops' (my_env.py:31 in _submit)`.

    The place is the innermost frame outside sparring, the standard library and installed packages; where there is
    none, the innermost of all. Of a file that is not Python it is where it ceases to be. Of the file it tells the name
    alone. Of an import that failed for want of a package of ours it tells how to install it.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({os.path.basename(error.filename)}:{error.lineno})"
    text = lacking(error) or f"{type(error).__name__}: {error}"
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return text
    frame, line = next((place for place in reversed(frames) if _is_authors(place[0])), frames[-1])
    return f"{text} ({os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name})"


def _is_authors(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    installed = "site-packages" in frame.f_code.co_filename
    return package != "sparring" and package not in sys.stdlib_module_names and not installed


def first_error(error: BaseException) -> Exception:
    """The first error inside nested exception groups: groups are how tasks end together, not what happened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else SparringError(f"a task ended by {error!r}")
