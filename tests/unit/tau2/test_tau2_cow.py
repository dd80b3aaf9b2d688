"""A fork behaves like a deep copy and never changes what it was forked from."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from sparring.envs.tau2.cow import CowDict, CowList, fork


class Item(BaseModel):
    name: str
    tags: list[str] = []
    prices: dict[str, float] = {}


class Store(BaseModel):
    items: dict[str, Item]
    shelf: list[Item]
    owner: Item
    note: str | None = None


ITEMS = st.builds(
    Item,
    name=st.text(max_size=3),
    tags=st.lists(st.text(max_size=2), max_size=3),
    prices=st.dictionaries(st.sampled_from("ab"), st.integers(0, 5).map(float), max_size=2),
)
STORES = st.builds(
    Store, items=st.dictionaries(st.sampled_from("wxyz"), ITEMS), shelf=st.lists(ITEMS, max_size=4), owner=ITEMS
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["name", "tag", "price", "pop", "put", "shelf", "append", "drop", "owner", "sort"]),
              st.sampled_from("wxyz"), st.integers(0, 3)),
    max_size=12,
)  # fmt: skip


def change(store: Store, what: str, key: str, number: int) -> Any:
    """What a tool may do: find a record by key, by index or by looking through a list, and write to it."""
    if what == "put":
        store.items[key] = Item(name=f"new {number}")
    elif what == "append":
        store.shelf.append(Item(name=f"new {number}"))
    elif what == "owner":
        store.owner.tags.append(key)
    elif what == "sort":
        store.shelf.sort(key=lambda item: item.name)
    elif what == "drop":
        return store.shelf.pop().name if store.shelf else None
    elif what == "shelf":
        found = next((item for item in store.shelf if len(item.tags) >= number), None)
        if found is not None:
            found.prices[key] = 1.0
            found.tags.append(key)
    elif key in store.items:
        if what == "pop":
            return store.items.pop(key).name
        item = store.items[key]
        if what == "name":
            item.name += "!"
        elif what == "tag":
            item.tags.append(key)
        else:
            item.prices[key] = number
    return None


@given(STORES, CHANGES, CHANGES)
@settings(max_examples=60, deadline=None)
def test_forks_behave_like_deep_copies_and_leave_the_origin_alone(store: Store, first: Any, second: Any) -> None:
    before = store.model_dump_json()
    template = fork(store)
    reference, one, other = copy.deepcopy(store), fork(template), fork(template)
    for step in first:
        assert change(one, *step) == change(reference, *step)
    for step in second:
        change(other, *step)
    assert one.model_dump() == reference.model_dump()
    assert store.model_dump_json() == before
    assert template.model_dump_json() == before


@given(STORES, CHANGES)
def test_a_fork_of_a_changed_fork_starts_from_the_change(store: Store, changes: Any) -> None:
    parent = fork(store)
    for step in changes:
        change(parent, *step)
    before = parent.model_dump()
    child = fork(parent)
    for key in "wxyz":
        change(child, "name", key, 0)
    change(child, "shelf", "w", 0)
    assert parent.model_dump() == before


def test_a_dictionary_tells_which_keys_may_differ() -> None:
    table = CowDict({"a": Item(name="a"), "b": Item(name="b"), "c": Item(name="c")})
    table["a"].name = "changed"
    del table["b"]
    assert table.touched == {"a", "b"}
    assert "b" not in table
    assert table.get("b") is None
    assert len(table) == 2


def test_scalars_are_shared_and_containers_of_scalars_are_copied() -> None:
    prices = {"a": 1.0}
    assert fork(prices) == prices
    assert fork(prices) is not prices
    assert type(fork(["x"])) is list
    assert type(fork([Item(name="x")])) is CowList


def test_handing_out_twice_gives_the_same_object() -> None:
    shelf = CowList([Item(name="a"), Item(name="b")])
    assert shelf[0] is shelf[0]
    assert next(iter(shelf)) is shelf[0]
    assert [item.name for item in reversed(shelf)] == ["b", "a"]
    assert shelf[0:1][0] is shelf[0]


def test_a_fork_is_what_json_and_pickling_and_copying_see() -> None:
    import pickle

    table = CowDict({"a": {"b": [1, 2]}})
    assert json.loads(json.dumps(table)) == {"a": {"b": [1, 2]}}
    assert pickle.loads(pickle.dumps(table)) == {"a": {"b": [1, 2]}}  # noqa: S301  # our own bytes
    assert copy.deepcopy(table) == table
