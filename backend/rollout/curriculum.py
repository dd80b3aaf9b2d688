"""A curriculum by measured success: tasks that are solved always or never come seldom, until that changes."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.backend.buffer.records import GroupSpec
from sparring.backend.rollout.sampler import Sampler, derive_seed

__all__ = ["Curriculum"]

_RAREST = 4  # a settled task is played at every 2⁴th of its turns at least: the model that could not may by now


class Curriculum:
    """Leaves out groups of another sampler whose task is settled: its last n groups had equal rewards each, so a
    success rate of 0 or 1 and no signal. Such a task takes part in one of 2ⁿ of its turns, 16 at most.

    What stands at a position is the other sampler's, so the position is still all that a resume needs, together with
    the rewards of the groups drawn before, which the buffer holds. An epoch in which every task is left out would
    never end: after as many positions as there are tasks the next group is taken as it is.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._settled: dict[tuple[str, str], dict[int, bool]] = {}  # by task, by position of the group
        self.seed = sampler.seed

    @property
    def size(self) -> int:
        return self._sampler.size

    def learn(self, spec: GroupSpec, rewards: Sequence[float]) -> None:
        if len(rewards) > 1:  # a group of one says nothing about a rate
            history = self._settled.setdefault((spec.env_id, spec.task_id), {})
            history[spec.seq] = len(set(rewards)) == 1

    def group(self, position: int) -> GroupSpec:
        for candidate in range(position, position + self.size):
            spec = self._sampler.group(candidate)
            if self._takes_part(spec):
                return spec
        return self._sampler.group(position + self.size)

    def _takes_part(self, spec: GroupSpec) -> bool:
        history = self._settled.get((spec.env_id, spec.task_id), {})
        settled = 0
        for seq in sorted(history, reverse=True):
            if not history[seq]:
                break
            settled += 1
        return derive_seed("curriculum", self.seed, spec.seq) % (1 << min(settled, _RAREST)) == 0
