"""A shell for a model."""

from __future__ import annotations

from sparring.sandbox.core import Sandbox
from sparring.sandbox.request import SandboxRequestError
from sparring.sandbox.session import ShellSession
from sparring.sandbox.tools.render import render_result

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
        before = self._session.generation
        try:
            result = await self._session.exec(command, timeout_s=self._timeout_s)
        except SandboxRequestError as error:
            return f"[error: {error}]"
        fresh = before and self._session.generation > before
        lost = "the shell had ended; this is a new one, with the same folder and exported variables" if fresh else ""
        return render_result(result, timeout_s=self._timeout_s, lost=lost)

    async def close(self) -> None:
        await self._session.close()
