"""A shell for a model."""

from __future__ import annotations

from sparring.sandbox.core import Sandbox
from sparring.sandbox.session import ShellSession
from sparring.sandbox.tools.render import run_and_render

__all__ = ["BashTool"]


class BashTool:
    """One persistent shell in a sandbox; opened by the first call."""

    def __init__(self, sandbox: Sandbox, *, timeout_s: float = 30.0) -> None:
        self._session = ShellSession(sandbox)
        self._timeout_s = timeout_s

    async def bash(self, command: str) -> str:
        """Run a command in a bash shell. The folder, variables and background jobs stay from call to call.

        Args:
            command: the command, or several lines of a script. It gets no input and cannot ask for any.
        """
        lost = "the shell had ended; this is a new one, with the same folder and exported variables"
        return await run_and_render(self._session, command, timeout_s=self._timeout_s, lost=lost)

    async def close(self) -> None:
        await self._session.close()
