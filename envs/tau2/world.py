"""One episode's world: upstream's tools over copy-on-write databases, and the comparison of two end states.

A `World` is a fork of a task's starting state. Its tools are upstream's own objects; what upstream's `Environment` does
around a tool call (errors become text, both sides are synchronised) is done here too, without the logging.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal

from pydantic import BaseModel

from sparring.envs.tau2.arithmetic import too_large
from sparring.envs.tau2.cow import CowDict, CowList, fork

__all__ = ["Requestor", "World", "same_state"]

Requestor = Literal["assistant", "user"]
_drawing: ContextVar[World | None] = ContextVar("tau2_drawing", default=None)
_ABSENT = object()


class World:
    """The databases and tools of one conversation.

    Attributes:
        environment: upstream's `Environment`, with toolkits of its own.
    """

    __slots__ = ("_drawn", "_seed", "environment")

    def __init__(self, environment: Any, *, seed: str = "") -> None:
        """`environment` is forked, not used. `seed` decides the ids that upstream's tools draw at random."""
        self.environment = _fork_environment(environment)
        self._seed = seed
        self._drawn = 0

    def respond(self, name: str, arguments: Mapping[str, Any], requestor: Requestor = "assistant") -> tuple[str, bool]:
        """Run a tool. Returns what upstream's tool message says, and whether it is an error. Never raises."""
        environment = self.environment
        token = _drawing.set(self)
        try:
            if name == "calculate" and too_large(arguments.get("expression")):
                raise OverflowError("int too large to convert to float")
            result = environment.make_tool_call(name, requestor=requestor, **arguments)
            environment.sync_tools()
            return environment.to_json_str(result), False
        except Exception as error:
            return f"Error: {error}", True
        finally:
            _drawing.reset(token)

    def draw_id(self) -> bytes:
        """The next 16 random bytes of this world; a generator of its own would outweigh the rest of an idle episode."""
        self._drawn += 1
        return hashlib.sha256(f"{self._seed} {self._drawn}".encode()).digest()[:16]

    def replay_gold(self, actions: Any) -> None:
        """Take the gold actions as upstream's evaluator does: without synchronising, and past those that fail."""
        token = _drawing.set(self)
        try:
            for action in actions:
                try:
                    self.environment.make_tool_call(action.name, requestor=action.requestor, **action.arguments)
                except Exception:  # upstream logs it and goes on
                    continue
        finally:
            _drawing.reset(token)


def _fork_environment(environment: Any) -> Any:
    new = copy.copy(environment)
    for side in ("tools", "user_tools"):
        kit = getattr(environment, side)
        if kit is not None:
            setattr(new, side, _fork_toolkit(kit))
    return new


def _fork_toolkit(kit: Any) -> Any:
    new = copy.copy(kit)
    for name, value in vars(kit).items():
        setattr(new, name, fork(value) if isinstance(value, BaseModel) else copy.deepcopy(value))
    # Upstream keeps a model on a toolkit's class and changes it in place (telecom's VPN profile), so that one episode
    # breaks another's; on the instance it is the episode's own.
    for kind in type(kit).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, BaseModel) and name not in vars(new):
                setattr(new, name, fork(value))
    return new


def same_state(one: World, other: World) -> bool:
    """Whether upstream's two hashes, of the agent's and of the user's database, would be equal.

    Both worlds must be forks of the same starting state: what neither has touched is not looked at.
    """
    sides = ("tools", "user_tools")
    return all(_same_database(getattr(one.environment, side), getattr(other.environment, side)) for side in sides)


def _same_database(kit: Any, other: Any) -> bool:
    if kit is None or kit.db is other.db:
        return True
    a, b = vars(kit.db), vars(other.db)
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, CowDict) and isinstance(b, CowDict):
        return all(_same(dict.get(a, key, _ABSENT), dict.get(b, key, _ABSENT)) for key in a.touched | b.touched)
    if isinstance(a, CowList) and isinstance(b, CowList):
        return len(a) == len(b) and all(map(_same, list.__iter__(a), list.__iter__(b)))
    return _canonical(a) == _canonical(b)


def _canonical(value: Any) -> str:
    """The JSON that upstream hashes, of a part of a database. An absent value is like no other."""
    return "" if value is _ABSENT else json.dumps(_plain(value), sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(warnings=False)
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in list.__iter__(value)]
    return value


class _Uuid:
    """Stands in for the module `uuid` in upstream's tools: inside an episode its ids come from the episode's seed."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def uuid4(self) -> Any:
        world = _drawing.get()
        return self._module.uuid4() if world is None else self._module.UUID(bytes=world.draw_id(), version=4)


def seed_ids(tools_module: Any) -> None:
    """Make the ids that a module of upstream's draws with uuid4 repeatable within episodes. Idempotent."""
    module = getattr(tools_module, "uuid", None)
    if module is not None and not isinstance(module, _Uuid):
        tools_module.uuid = _Uuid(module)
