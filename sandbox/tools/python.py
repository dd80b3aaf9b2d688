"""A stateful Python interpreter inside a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from sparring.sandbox.core import Sandbox
from sparring.sandbox.live import Session
from sparring.sandbox.tools.render import run_and_render

__all__ = ["PythonInterpreter", "PythonTool"]


class PythonInterpreter(Session):
    """Runs cells in one namespace. An exception ends its cell alone; a runaway cell gets KeyboardInterrupt.

    The exit code is 0, 1 after an exception, that of SystemExit, or 124 after a time-out. The value of a last
    expression is printed. An interpreter that cannot be interrupted is replaced, and its variables are lost.
    """

    name: ClassVar[str] = "python3"

    def _argv(self) -> Sequence[str]:
        return ["python3", "-u", "-c", _driver()]

    def _order(self, code: str, mark: str) -> bytes:
        return json.dumps({"code": code, "mark": mark}).encode() + b"\n"

    def _interruption(self, mark: str) -> bytes:
        return json.dumps({"interrupt": True, "mark": mark}).encode() + b"\n"


class PythonTool:
    """One interpreter in a sandbox; started by the first call."""

    def __init__(self, sandbox: Sandbox, *, timeout_s: float = 30.0) -> None:
        self._interpreter = PythonInterpreter(sandbox)
        self._timeout_s = timeout_s

    async def python(self, code: str) -> str:
        """Run Python code. Variables, functions and imports stay from call to call; print what you want to see.

        Args:
            code: Python statements; the value of a last expression is printed.
        """
        lost = "the interpreter had ended; this is a new one, without the earlier variables"
        return await run_and_render(self._interpreter, code, timeout_s=self._timeout_s, lost=lost)

    async def close(self) -> None:
        await self._interpreter.close()


@cache
def _driver() -> str:
    return (Path(__file__).parent / "python_driver.py").read_text()
