"""Copy-on-write for trees of pydantic models: a fork costs what is touched, not what there is.

A domain's database is loaded once and forked for each episode. In the fork, dictionaries and lists are real ones (of a
subclass), so whatever reads them in C, pydantic's serialiser too, sees the truth; their values are the original's until
they are handed out by key or by iteration, and then a fork of the value takes its place. The original must not change
while it has forks.

What is not covered: a value reached through `values()` or `items()` is the original. Upstream's tools only read those;
the tests hold that the originals stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, SupportsIndex, TypeVar

from pydantic import BaseModel

__all__ = ["CowDict", "CowList", "fork"]

T = TypeVar("T")


def fork(value: T) -> T:
    """A copy whose containers copy their values when these are first handed out. Scalars are shared.

    Models are copied at once, field by field, since nothing sees an attribute being read; sets, tuples and other
    objects are taken for immutable.
    """
    if isinstance(value, BaseModel):
        return _fork_model(value)
    if isinstance(value, dict):
        return CowDict(value) if _any_mutable(value.values()) else dict(value)  # type: ignore[return-value]
    if isinstance(value, list):
        return CowList(value) if _any_mutable(list.__iter__(value)) else list(value)  # type: ignore[return-value]
    return value


def _fork_model(model: Any) -> Any:
    kind: Any = type(model)
    copy = object.__new__(kind)
    fields = model.__dict__.copy()
    for name, value in fields.items():
        if type(value) not in _SCALARS and isinstance(value, _MUTABLE):
            fields[name] = fork(value)
    # Past pydantic's own __setattr__ and __init__: nothing is validated twice, and frozen models can be forked.
    set_attribute = object.__setattr__
    set_attribute(copy, "__dict__", fields)
    set_attribute(copy, "__pydantic_fields_set__", _all_fields(kind))
    set_attribute(copy, "__pydantic_extra__", fork(model.__pydantic_extra__))
    set_attribute(copy, "__pydantic_private__", fork(model.__pydantic_private__))
    return copy


@cache
def _all_fields(model: Any) -> set[str]:
    """One set for all forks of a class: with every field in it already, no assignment ever changes it."""
    return set(model.model_fields)


def _any_mutable(values: Iterable[Any]) -> bool:
    return any(type(value) not in _SCALARS and isinstance(value, _MUTABLE) for value in values)


class CowDict(dict[Any, Any]):
    """A dictionary that forks a value when it is first handed out by key.

    Attributes:
        touched: the keys where it may differ from its origin.
    """

    __slots__ = ("touched",)

    def __init__(self, origin: dict[Any, Any]) -> None:
        super().__init__(origin)
        self.touched: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if key not in self.touched:
            value = fork(value)
            self[key] = value
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.touched.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self.touched.add(key)
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def update(self, *others: Any, **more: Any) -> None:
        for key, value in dict(*others, **more).items():
            self[key] = value

    def clear(self) -> None:
        self.touched.update(self)
        super().clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> CowDict:
        return CowDict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class CowList(list[Any]):
    """A list that forks a value when it is first handed out, by index or by iteration."""

    __slots__ = ("_foreign", "_ids", "_origin")

    def __init__(self, origin: list[Any]) -> None:
        super().__init__(list.__iter__(origin))  # not through the origin's own iterator, which would fork there
        self._origin = origin  # keeps the foreign values alive, so that no id among them is used again
        self._foreign = origin.identities() if isinstance(origin, CowList) else frozenset(map(id, origin))
        self._ids: frozenset[int] | None = None

    def identities(self) -> frozenset[int]:
        """The ids of the values, once for all forks of this list."""
        if self._ids is None:
            self._ids = frozenset(map(id, list.__iter__(self)))
        return self._ids

    def __iter__(self) -> Iterator[Any]:
        foreign = self._foreign
        for index, value in enumerate(super().__iter__()):
            if id(value) in foreign:
                value = fork(value)
                super().__setitem__(index, value)
            yield value

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        value = super().__getitem__(index)
        if id(value) in self._foreign:
            value = fork(value)
            super().__setitem__(index, value)
        return value

    def __reversed__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self) - 1, -1, -1))

    def pop(self, index: SupportsIndex = -1) -> Any:
        value = self[index]
        super().pop(index)
        return value

    def sort(self, **how: Any) -> None:
        self[:] = sorted(self, **how)

    def copy(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> CowList:
        return CowList(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


_MUTABLE = (dict, list, BaseModel)  # BaseModel last: asking it costs a call in Python
_SCALARS = frozenset({str, int, float, bool, type(None)})
