"""Task ids: `train/0`, `train/1`, ...; as many as a split has, without a list of them in memory."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

__all__ = ["TaskRange", "nearest_tasks"]


class TaskRange(Sequence[str]):
    """The ids `<split>/0` to `<split>/<count - 1>`; indexing and membership cost the same for any count."""

    def __init__(self, split: str, count: int) -> None:
        self.split = split
        self._numbers = range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [f"{self.split}/{number}" for number in self._numbers[index]]
        return f"{self.split}/{self._numbers[index]}"

    def __iter__(self) -> Iterator[str]:
        return (f"{self.split}/{number}" for number in self._numbers)

    def __contains__(self, task_id: object) -> bool:
        if not isinstance(task_id, str):
            return False
        split, _, number = task_id.partition("/")
        canonical = number.isascii() and number.isdigit() and len(number) < 20 and number == str(int(number))
        return split == self.split and canonical and int(number) in self._numbers

    def __repr__(self) -> str:
        return f"TaskRange({self.split!r}, {len(self)})"


def nearest_tasks(task_id: str, *splits: Sequence[str]) -> list[str]:
    """Up to three ids that look most like an unknown one. Large splits are searched at their start and end alone."""
    candidates = [known for ids in splits if ids for known in (*islice(iter(ids), 500), ids[-1])]
    return difflib.get_close_matches(task_id, candidates, n=3, cutoff=0.4) or candidates[:3]
