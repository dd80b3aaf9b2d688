"""A file viewer and editor for a model: exact matches, and errors that say what to do."""

from __future__ import annotations

import asyncio
import difflib
import re

from sparring.sandbox.core import Sandbox
from sparring.sandbox.request import SandboxRequestError
from sparring.sandbox.spec import MIB
from sparring.sandbox.tools.render import shortened

__all__ = ["EditorTool"]

_MAX_BYTES = 8 * MIB
_MAX_LINES = 400
_MAX_SHOWN = 32_000  # characters
_MAX_WIDTH = 2_000
_CONTEXT_LINES = 4
_COMPARED_LINES, _COMPARED_WIDTH = 2_000, 200


class EditorTool:
    """Views and edits text files in a sandbox. Line ends and everything not edited stay byte for byte."""

    def __init__(self, sandbox: Sandbox, *, timeout_s: float = 30.0) -> None:
        self._sandbox = sandbox
        self._timeout_s = timeout_s

    async def view_file(self, path: str, first_line: int = 1, last_line: int | None = None) -> str:
        """Show a text file with line numbers, or list a folder.

        Args:
            path: relative to the work folder.
            first_line: the first line to show, from 1.
            last_line: the last line to show; by default as many as fit.
        """
        try:
            listing = await self._sandbox.exec(
                ["sh", "-c", '[ -d "$1" ] && cd -- "$1" && ls -1Ap', "sh", self._sandbox.resolve(path)],
                timeout_s=self._timeout_s,
            )
            if listing.ok:
                return shortened(listing.stdout.rstrip("\n"), _MAX_SHOWN) or "[empty folder]"
            lines = _lines(await self._read(path))
        except SandboxRequestError as error:
            return f"[error: {error}]"
        if not lines:
            return "[empty file]"
        if not 1 <= first_line <= len(lines) or (last_line is not None and last_line < first_line):
            return f"[error: {path} has lines 1 to {len(lines)}; lines {first_line} to {last_line} are not there]"
        last = min(len(lines), last_line or len(lines), first_line + _MAX_LINES - 1)
        shown, last = _numbered(lines, first_line, last)
        more = f"\n[{len(lines) - last} more lines; view from line {last + 1}]" if last < len(lines) else ""
        return shown + (more if last_line is None or last < last_line else "")

    async def create_file(self, path: str, content: str) -> str:
        """Write a new file, or replace a whole file.

        Args:
            path: relative to the work folder; its folders are made.
            content: the whole new content.
        """
        return await self._write(path, content, f"[wrote {path}: {len(_lines(content))} lines]")

    async def replace_in_file(self, path: str, old: str, new: str) -> str:
        """Replace a piece of text that occurs exactly once.

        Args:
            path: relative to the work folder.
            old: the text to replace, exactly as in the file, white space included.
            new: what to put there.
        """
        try:
            text = await self._read(path)
        except SandboxRequestError as error:
            return f"[error: {error}]"
        if not old:
            return "[error: old is empty; use insert_in_file or create_file]"
        # A model sees and writes plain line ends; a file with others keeps them.
        if old not in text and "\r\n" in text:
            old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
        found = text.count(old)
        if found == 0:
            return f"[error: old does not occur in {path}. {await asyncio.to_thread(_nearest, text, old)}]"
        if found > 1:
            at = [text.count("\n", 0, index) + 1 for index in _occurrences(text, old)]
            places = ", ".join(map(str, at[:10]))
            return f"[error: old occurs {found} times in {path}, at lines {places}; give more of the text around it]"
        start = text.index(old)
        edited = text[:start] + new + text[start + len(old) :]
        return await self._write(path, edited, _around(edited, text.count("\n", 0, start) + 1, new.count("\n") + 1))

    async def insert_in_file(self, path: str, after_line: int, text: str) -> str:
        """Insert lines.

        Args:
            path: relative to the work folder.
            after_line: the number of the line after which they come; 0 is the top of the file.
            text: the lines.
        """
        try:
            lines = _lines(await self._read(path))
        except SandboxRequestError as error:
            return f"[error: {error}]"
        if not 0 <= after_line <= len(lines):
            return f"[error: after_line must be from 0 to {len(lines)}, the lines of {path}, not {after_line}]"
        end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        added = [_bare(line) + end for line in _lines(text)]
        if added and after_line == len(lines) and lines and not lines[-1].endswith("\n"):
            lines[-1] += end
        edited = "".join([*lines[:after_line], *added, *lines[after_line:]])
        return await self._write(path, edited, _around(edited, after_line + 1, max(1, len(added))))

    async def _read(self, path: str) -> str:
        data = await self._sandbox.read(path, max_bytes=_MAX_BYTES, timeout_s=self._timeout_s)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise SandboxRequestError(f"{path} is not a text file (not UTF-8)") from None

    async def _write(self, path: str, text: str, done: str) -> str:
        try:
            mode = await self._mode(path)
            await self._sandbox.write(path, text.encode("utf-8", "replace"), mode=mode, timeout_s=self._timeout_s)
        except SandboxRequestError as error:
            return f"[error: {error}]"
        return done

    async def _mode(self, path: str) -> int:
        """The permissions of the file, so that an edited script stays one that can be run."""
        stat = await self._sandbox.exec(["stat", "-c", "%a", self._sandbox.resolve(path)], timeout_s=self._timeout_s)
        return int(stat.stdout, 8) & 0o777 if stat.ok else 0o644


def _lines(text: str) -> list[str]:
    """The lines with their ends. A newline ends one and nothing else does: a form feed is text, as it is to `sed`."""
    return re.findall(r"[^\n]*\n|[^\n]+\Z", text)


def _bare(line: str) -> str:
    return line.rstrip("\r\n")


def _numbered(lines: list[str], first: int, last: int) -> tuple[str, int]:
    """The lines with their numbers, as far as they fit, and the number of the last one shown."""
    shown: list[str] = []
    length = 0
    for number in range(first, last + 1):
        line = _bare(lines[number - 1])
        if len(line) > _MAX_WIDTH:
            line = f"{line[:_MAX_WIDTH]} [... {len(line) - _MAX_WIDTH} more characters]"
        length += len(line)
        if shown and length > _MAX_SHOWN:
            return "\n".join(shown), number - 1
        shown.append(f"{number:6}\t{line}")
    return "\n".join(shown), last


def _around(text: str, first: int, count: int) -> str:
    """The edited lines and some around them."""
    lines = _lines(text)
    start, end = max(1, first - _CONTEXT_LINES), min(len(lines), first + count - 1 + _CONTEXT_LINES)
    return f"[edited]\n{_numbered(lines, start, end)[0]}" if lines else "[edited: the file is empty now]"


def _occurrences(text: str, part: str) -> list[int]:
    found, at = [], text.find(part)
    while at >= 0:
        found.append(at)
        at = text.find(part, at + len(part))
    return found


def _nearest(text: str, old: str) -> str:
    """The line of the file that is most like the first line of `old`: mostly it differs in white space."""
    lines = [_bare(line) for line in _lines(text)]
    wanted = next((_bare(line) for line in _lines(old) if line.strip()), "")
    for number, line in enumerate(lines, 1):
        if wanted.strip() and line.strip() == wanted.strip() and line != wanted:
            return f"Line {number} differs in white space only: {line!r}"
    # Likeness takes time in the square of the length: of lines that are too long, their beginnings are compared.
    starts = [line[:_COMPARED_WIDTH] for line in lines[:_COMPARED_LINES]]
    close = difflib.get_close_matches(wanted[:_COMPARED_WIDTH], starts, n=1, cutoff=0.6)
    if close:
        return f"The nearest line is {starts.index(close[0]) + 1}: {close[0]!r}"
    return "View the file first; white space counts"
