"""A command's result as text for a model."""

from __future__ import annotations

from sparring.sandbox.command import ExecResult

__all__ = ["render_result", "shortened"]


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
