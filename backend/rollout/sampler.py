"""Which task comes next: epochs over a data set, each in an order of its own, as a pure function of the position.

A `Sampler` is anything with `group`: a data set (`TaskSampler`), several by weight (`MixtureSampler`), or one of these
without the tasks that teach nothing at present (`curriculum.Curriculum`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

from sparring.backend.buffer.records import GroupSpec
from sparring.errors import TaskError

__all__ = ["MixtureSampler", "Sampler", "TaskSampler", "derive_seed"]


class Sampler(Protocol):
    """Attributes: `seed` of the run; `size`, the number of tasks."""

    seed: int

    @property
    def size(self) -> int: ...

    def group(self, position: int) -> GroupSpec:
        """The first group at or behind `position`; the next position is the one behind its `seq`."""
        ...

    def learn(self, spec: GroupSpec, rewards: Sequence[float]) -> None:
        """A group of this sampler ended; `rewards` are those of its members that did not fail, in any order."""
        ...


class TaskSampler:
    """Draws groups from a finite sequence of task ids.

    The group at a position depends on the seed and the position alone, so a run resumes by its position, and a data
    set of millions costs no list: each epoch's order is a keyed permutation, computed index by index. A data set
    smaller than a batch wraps into its next epoch.

    Raises:
        TaskError: the data set is empty.
    """

    def __init__(
        self, env_id: str, task_ids: Sequence[str], *, group_size: int, seed: int, split: str = "train"
    ) -> None:
        if not task_ids:
            raise TaskError(
                f"{env_id} has no task in its split {split!r}: check the data set's path and filters (env.kwargs)"
            )
        self.env_id = env_id
        self._task_ids = task_ids
        self._group_size = group_size
        self.seed = seed
        self._split = split

    @property
    def size(self) -> int:
        return len(self._task_ids)

    def learn(self, spec: GroupSpec, rewards: Sequence[float]) -> None:
        """Nothing: the order is fixed."""

    def group(self, position: int) -> GroupSpec:
        """The group drawn at `position`, from 0."""
        epoch, index = divmod(position, len(self._task_ids))
        task_index = _permute(index, len(self._task_ids), key=f"{self.seed}/{epoch}")
        return GroupSpec(
            seq=position,
            group_id=group_name(position),
            env_id=self.env_id,
            task_id=self._task_ids[task_index],
            seed=derive_seed(self.seed, self._split, position),
            size=self._group_size,
            split=self._split,
        )


class MixtureSampler:
    """Several samplers by weight. As they, a pure function of the position.

    Each position goes to the part that is furthest behind its share, so that any run of groups, a step's too, holds
    the mixture as closely as whole groups can: no part is ever a whole group ahead of its share.

    Args:
        parts: samplers with their weights; the samplers are of one seed.
    """

    def __init__(self, parts: Sequence[tuple[TaskSampler, float]]) -> None:
        self._samplers = [sampler for sampler, _ in parts]
        total = sum(weight for _, weight in parts)
        self._shares = [weight / total for _, weight in parts]
        self._turns: list[tuple[int, int]] = []  # by position: part, position within the part
        self._counts = [0] * len(parts)
        self.seed = self._samplers[0].seed

    @property
    def size(self) -> int:
        return sum(sampler.size for sampler in self._samplers)

    def learn(self, spec: GroupSpec, rewards: Sequence[float]) -> None:
        """Nothing: the order is fixed."""

    def group(self, position: int) -> GroupSpec:
        """The group drawn at `position`, from 0."""
        while len(self._turns) <= position:
            drawn = len(self._turns) + 1
            behind = [share * drawn - count for share, count in zip(self._shares, self._counts, strict=True)]
            part = behind.index(max(behind))
            self._turns.append((part, self._counts[part]))
            self._counts[part] += 1
        part, inner = self._turns[position]
        spec = self._samplers[part].group(inner)
        seed = derive_seed(self.seed, spec.split, position)
        return replace(spec, seq=position, group_id=group_name(position), seed=seed)


def group_name(position: int) -> str:
    return f"g{position:07d}"


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2³¹) from whatever names it; the same on every machine."""
    return int.from_bytes(_digest("/".join(map(str, parts)))) >> 33


def _permute(index: int, size: int, *, key: str) -> int:
    """Where a keyed pseudo-random permutation of range(size) sends `index`.

    A four-round Feistel network on the next even number of bits (Luby and Rackoff, 1988), walked until it lands
    inside the range (Black and Rogaway, 2002): four steps on average at most.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_ in range(4):
            left, right = right, left ^ (int.from_bytes(_digest(f"{key}/{round_}/{right}")) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
