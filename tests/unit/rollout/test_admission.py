"""Admission: AReaL's bound in whole groups, and the two laws that no order of events may break."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparring.backend.rollout import Admission, capacity
from sparring.config import RolloutConfig
from sparring.errors import ConfigError


@pytest.mark.parametrize(
    ("max_running", "groups_per_step", "staleness", "version", "accepted", "running", "expected"),
    [  # AReaL's own values
        (100, 4, 2, 0, 0, 0, 12),
        (1000, 4, 2, 5, 0, 0, 32),
        (20, 4, 2, 0, 5, 0, 7),
        (100, 8, 0, 0, 0, 0, 8),
        (100, 8, 0, 5, 0, 0, 48),
        (100, 4, 2, 0, 13, 0, -1),  # may be negative
        (3, 4, 2, 0, 0, 2, 1),
    ],
)
def test_capacity_has_areals_values(max_running, groups_per_step, staleness, version, accepted, running, expected):
    assert expected == capacity(
        max_running=max_running,
        groups_per_step=groups_per_step,
        staleness=staleness,
        version=version,
        accepted=accepted,
        running=running,
    )


def config(**values: int) -> RolloutConfig:
    return RolloutConfig(**{"groups_per_step": 2, "staleness": 1, "max_running_groups": 100, **values})


def start_all(admission: Admission) -> int:
    started = 0
    while admission.may_start:
        admission.start()
        started += 1
    return started


def test_synchronous_runs_start_nothing_for_a_version_before_it_is_published():
    admission = Admission(config(staleness=0))
    assert start_all(admission) == 2
    admission.accept()
    admission.accept()
    admission.take(2)
    assert start_all(admission) == 0
    admission.publish(1)
    assert start_all(admission) == 2


def test_a_short_step_gives_no_room_to_the_next_one():
    admission = Admission(config(staleness=0, max_refill=0))
    start_all(admission)
    admission.refuse()
    assert not admission.may_start
    assert not admission.due
    admission.accept()
    assert admission.due
    admission.take(1)
    assert start_all(admission) == 0


def test_a_dropped_or_expired_group_gives_its_room_back():
    admission = Admission(config(staleness=0))
    start_all(admission)
    admission.refuse()
    assert start_all(admission) == 1
    admission.accept()
    admission.expire()
    assert start_all(admission) == 1
    assert admission.refused == 1


def test_the_buffer_and_the_number_of_running_groups_hold_back():
    assert start_all(Admission(config(staleness=9, max_running_groups=3))) == 3
    admission = Admission(config(staleness=9, buffer_groups=4))
    assert start_all(admission) == 4
    for _ in range(4):
        admission.accept()
    assert start_all(admission) == 0


def test_a_resume_with_too_much_starts_nothing_until_it_fits_the_bound():
    admission = Admission(config(), version=3, ready=5)
    assert admission.room == -1
    admission.take(2)
    assert admission.room == -1
    admission.publish(4)
    assert start_all(admission) == 1


def test_a_buffer_smaller_than_a_step_is_refused():
    with pytest.raises(ConfigError, match="no step would ever fill"):
        Admission(config(buffer_groups=1))


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of events. Each group remembers the version at which it started: its oldest possible token's."""

    @initialize(
        b=st.integers(1, 4),
        eta=st.integers(0, 3),
        running=st.integers(1, 8),
        extra=st.integers(0, 4),
        refill=st.integers(0, 3),
        version=st.integers(0, 5),
        leftover=st.lists(st.integers(0, 3), max_size=6),
    )
    def begin(self, b, eta, running, extra, refill, version, leftover):
        self.b, self.eta = b, eta
        self.config = RolloutConfig(
            groups_per_step=b, staleness=eta, max_running_groups=running, buffer_groups=b + extra, max_refill=refill
        )
        self.running: list[int] = []
        # After a resume: any number of ready groups, of any age; the trainer expires what is too old.
        self.ready = [version - age for age in leftover]
        self.admission = Admission(self.config, version=version, ready=len(self.ready))

    @precondition(lambda self: self.admission.may_start)
    @rule()
    def start(self):
        self.admission.start()
        self.running.append(self.admission.version)
        assert self.admission.running + self.admission.accepted <= (self.admission.version + self.eta + 1) * self.b
        assert len(self.running) <= self.config.max_running_groups
        assert len(self.running) + len(self.ready) <= self.config.buffer_groups
        if self.eta == 0:
            assert self.admission.step == self.admission.version

    @precondition(lambda self: self.running)
    @rule(data=st.data(), signal=st.booleans())
    def finish(self, data, signal):
        started = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if signal:
            self.ready.append(started)
            self.admission.accept()
        else:
            self.admission.refuse()

    def expire_stale(self):
        for started in [s for s in self.ready if self.admission.version - s > self.eta]:
            self.ready.remove(started)
            self.admission.expire()

    @precondition(lambda self: self.admission.step == self.admission.version)
    @rule()
    def train_if_due(self):
        self.expire_stale()
        taken = sorted(self.ready)[: self.b]
        if not self.admission.due or not taken:  # due and nothing there: the run stops with an error
            return
        assert all(self.admission.version - started <= self.eta for started in taken)
        for started in taken:
            self.ready.remove(started)
        self.admission.take(len(taken))

    @precondition(lambda self: self.admission.step > self.admission.version)
    @rule()
    def publish(self):
        self.admission.publish(self.admission.version + 1)

    @rule()
    def kill_and_resume(self):
        """What runs is replayed through admission, so it starts anew; what is ready stays so."""
        if self.admission.step == self.admission.version:
            self.running = []
            self.admission = Admission(self.config, version=self.admission.version, ready=len(self.ready))

    @invariant()
    def counts_agree(self):
        assert (self.admission.running, self.admission.ready) == (len(self.running), len(self.ready))

    def teardown(self):
        """No stall: from any state, if every group from now on has signal, the next step comes in finite time."""
        if self.admission.step > self.admission.version:
            self.publish()
        self.expire_stale()
        for _ in range(100):
            if self.admission.due:
                break
            if self.admission.may_start:
                self.admission.start()
            else:
                assert self.admission.running, "a stall: nothing runs, nothing may start, and no step is due"
                self.admission.accept()
        assert self.admission.due


TestAdmissionMachine = pytest.mark.slow(AdmissionMachine.TestCase)
TestAdmissionMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
