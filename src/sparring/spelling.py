"""The nearest of the names that there are, for whoever misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]

_LONGEST = 100  # characters compared: what is asked for may be a model's, of any length
_CUTOFF = 0.5  # of difflib's similarity, from 0 to 1


def nearest(name: str, known: Iterable[str], *, abbreviated: bool = False) -> str | None:
    """The known name that is spelt most like `name`; None where none is at all like it.

    Args:
        abbreviated: `name` may well be the beginning of one: the shortest of such comes first.
    """
    names = list(known)
    longer = [other for other in names if other.startswith(name)] if abbreviated and name else []
    if longer:
        return min(longer, key=len)
    return next(iter(difflib.get_close_matches(name[:_LONGEST], names, n=1, cutoff=_CUTOFF)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """How an error about an unknown name goes on: `; did you mean NAME?`, or "" where no name is like it."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near is not None else ""
