"""Which group may start, and when a step is due: counts alone, so that its laws can be tested alone.

The bound is AReaL's (arXiv:2505.24298, section 5.1), counted in groups: with B groups a step and staleness η, a group
may start only if running + accepted < (version + η + 1) · B, where accepted counts the consumed ones too.
"""

from __future__ import annotations

from sparring.config import RolloutConfig
from sparring.errors import ConfigError

__all__ = ["Admission", "capacity"]


def capacity(
    *, max_running: int, groups_per_step: int, staleness: int, version: int, accepted: int, running: int
) -> int:
    """How many more groups may start; negative where a resume left more than the bound allows."""
    return min(max_running - running, (staleness + version + 1) * groups_per_step - accepted - running)


class Admission:
    """Counts groups through their life: started, then ready or gone, then taken by a step.

    A step that trains on fewer than B groups spends the room of B all the same: were the rest handed on, the next
    groups would start before the version is published that they are meant for.

    Attributes:
        version: optimizer steps done whose weights are published: those that a group samples which starts now.
        step: the last step that took its batch; `version + 1` while its update is being computed, and up to
            `version + η + 1` where an evaluation holds the engine's weights and the trainer goes on.
        running, ready: groups in play, and groups that wait to be trained.
        refused: groups dropped since the last step took its batch (no signal, or too many failures).

    Raises:
        ConfigError: the buffer is smaller than a step, which could then never fill.
    """

    def __init__(self, config: RolloutConfig, *, version: int = 0, ready: int = 0) -> None:
        if config.buffer_groups < config.groups_per_step:
            raise ConfigError(
                f"rollout.buffer_groups={config.buffer_groups} holds less than one step of "
                f"rollout.groups_per_step={config.groups_per_step}: no step would ever fill; raise the first"
            )
        self._config = config
        self.version = version
        self.step = version
        self.running = 0
        self.ready = ready
        self.refused = 0

    @property
    def accepted(self) -> int:
        """Groups accepted in all, those of past steps included."""
        return self.step * self._config.groups_per_step + self.ready

    @property
    def room(self) -> int:
        """How many more groups may start now; negative where there are too many already."""
        within_bound = capacity(
            max_running=self._config.max_running_groups,
            groups_per_step=self._config.groups_per_step,
            staleness=self._config.staleness,
            version=self.version,
            accepted=self.accepted,
            running=self.running,
        )
        return min(within_bound, self._config.buffer_groups - self.ready - self.running)

    @property
    def refills(self) -> int:
        """How many refused groups of this step were or may be replaced."""
        return min(self.refused, self._config.max_refill)

    @property
    def exhausted(self) -> bool:
        """More groups were refused than a step may replace, and the step is not full: it waits for those running."""
        return self.refused > self._config.max_refill and self.ready < self._config.groups_per_step

    @property
    def may_start(self) -> bool:
        return self.room > 0 and not self.exhausted

    @property
    def due(self) -> bool:
        """Whether a step should take what is ready now: a full batch, or all that it will get."""
        return self.ready >= self._config.groups_per_step or (self.exhausted and self.running == 0)

    def start(self) -> None:
        assert self.may_start, "a group was started without room"
        self.running += 1

    def accept(self) -> None:
        """A running group is complete and carries signal."""
        self.running -= 1
        self.ready += 1

    def refuse(self) -> None:
        """A running group is dropped: no signal, or fewer than two survivors. Its room comes back."""
        self.running -= 1
        self.refused += 1

    def expire(self) -> None:
        """A ready group is over the staleness bound. Its room comes back, and it does not count as a refill."""
        self.ready -= 1

    def take(self, groups: int) -> None:
        """Step `step + 1` takes so many ready groups, B at most."""
        assert not self.lagging(self.step), f"step {self.step} may train nothing that version {self.version} samples"
        assert 0 < groups <= min(self.ready, self._config.groups_per_step), f"a step cannot take {groups} groups"
        self.ready -= groups
        self.step += 1
        self.refused = 0

    def publish(self, version: int) -> None:
        """The weights after `version` optimizer steps are live. Versions never go back within a process."""
        self.version = max(self.version, version)
        self.step = max(self.step, self.version)

    def lagging(self, step: int) -> bool:
        """Whether the live weights are so old that nothing which they sample may be trained by step `step + 1`."""
        return step - self.version > self._config.staleness
