"""A command's result as text for a model."""

from __future__ import annotations

from sparring.sandbox.command import ExecResult
from sparring.sandbox.live import Session
from sparring.sandbox.request import SandboxRequestError

__all__ = ["render_result", "run_and_render", "shortened"]


async def run_and_render(session: Session, code: str, *, timeout_s: float, lost: str) -> str:
    """Run code in a session for a model; `lost` tells it what is gone, where the session's process had to be replaced.

    Raises:
        SandboxError: the sandbox broke.
    """
    before = session.generation
    try:
        result = await session.exec(code, timeout_s=timeout_s)
    except SandboxRequestError as error:
        return f"[error: {error}]"
    replaced = before and session.generation > before
    return render_result(result, timeout_s=timeout_s, lost=lost if replaced else "")


def render_result(result: ExecResult, *, timeout_s: float, lost: str = "", limit: int = 16_000) -> str:
    """Output, then in brackets what the model cannot see otherwise: exit code, time-out, memory, lost state.

    At most about `limit` characters of each stream, from its beginning and its end.
    """
    parts = [shortened(text, limit) for text in (result.stdout, result.stderr) if text]
    if result.timed_out:
        parts.append(f"[timed out after {timeout_s:g} s and was interrupted]")
    elif result.oom_killed:
        parts.append("[killed: out of memory]")
    elif result.exit_code != 0:
        parts.append(f"[exit code {result.exit_code}]")
    if lost:
        parts.append(f"[{lost}]")
    return "\n".join(part.rstrip("\n") for part in parts) or "[no output]"


def shortened(text: str, limit: int) -> str:
    """A text's beginning and end, about `limit` characters together."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
