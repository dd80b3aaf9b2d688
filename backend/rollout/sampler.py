"""Which task comes next: epochs over a data set, each in an order of its own, as a pure function of the position."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from sparring.backend.buffer.records import GroupSpec
from sparring.errors import TaskError

__all__ = ["TaskSampler", "derive_seed"]


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

    def group(self, position: int) -> GroupSpec:
        """The group drawn at `position`, from 0."""
        epoch, index = divmod(position, len(self._task_ids))
        task_index = _permute(index, len(self._task_ids), key=f"{self.seed}/{epoch}")
        return GroupSpec(
            seq=position,
            group_id=f"g{position:07d}",
            env_id=self.env_id,
            task_id=self._task_ids[task_index],
            seed=derive_seed(self.seed, self._split, position),
            size=self._group_size,
            split=self._split,
        )


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
