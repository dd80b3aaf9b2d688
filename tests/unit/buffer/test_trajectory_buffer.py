"""The durable buffer: every trajectory has one fate, and what goes wrong says what to do."""

import sqlite3
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from sparring.backend.buffer import BufferView, GroupSpec, TrajectoryBuffer
from sparring.backend.buffer.harvest import training_rows
from sparring.errors import BufferStateError
from sparring.types import EpisodeSpec, Failure, StopReason, TokenSequence, Trajectory, Turn, Usage


def trajectory(spec: EpisodeSpec, *, reward: float | None = 1.0, version: int = 0) -> Trajectory:
    return Trajectory(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        env_id=spec.env_id,
        task_id=spec.task_id,
        seed=spec.seed,
        split=spec.split,
        attempt=spec.attempt,
        sequences=(
            TokenSequence([1, 2, 3], [False, True, True], [0, -0.1, -0.7], [-1, version, version], (Turn(1, 3),)),
        ),
        reward=reward,
        stop_reason=StopReason.FINISHED if reward is not None else StopReason.FAILED,
        failure=None if reward is not None else Failure("sandbox", "the container is gone"),
        usage=Usage(1, 2, 1),
        messages=({"role": "user", "content": "hello"},),
    )


def group(seq: int, size: int = 2) -> GroupSpec:
    return GroupSpec(seq, f"g{seq}", "env/X-v0", f"train-{seq}", seed=seq, size=size)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "buffer.db"


@pytest.fixture
def buffer(path):
    buffer = TrajectoryBuffer.open(path)
    buffer.begin(0)
    yield buffer
    buffer.close()


def fill(buffer: TrajectoryBuffer, seq: int, version: int = 0) -> GroupSpec:
    """A ready group of two."""
    spec = group(seq)
    buffer.start_group(spec)
    for member in range(spec.size):
        buffer.store(trajectory(spec.episode(member), reward=float(member), version=version))
    buffer.accept_group(spec.group_id)
    return spec


def episodes_of(spec: GroupSpec) -> dict[str, list[str]]:
    return {spec.group_id: [spec.episode(member).episode_id for member in range(spec.size)]}


def fates(path) -> dict[str, tuple[str, int | None]]:
    with BufferView(path) as view:
        return {row.episode_id: (row.state, row.consumed_step) for row in view.ledger()}


def test_what_is_stored_comes_back_exactly(buffer, path):
    stored = trajectory(group(0).episode(0))
    buffer.start_group(group(0))
    buffer.store(stored)
    with BufferView(path) as view:
        assert view.trajectory(stored.episode_id) == stored
        (row,) = view.episodes()
    assert (row.reward, row.action_tokens, row.turns, row.oldest_version, row.state) == (1.0, 2, 1, 0, "pending")


def test_an_episode_is_stored_once(buffer, path):
    buffer.start_group(group(0))
    buffer.store(trajectory(group(0).episode(0), reward=1.0))
    with pytest.raises(BufferStateError, match=r"g0\.00\.0 is stored already"):
        buffer.store(trajectory(group(0).episode(0), reward=0.0))
    assert len(fates(path)) == 1


def test_a_batch_is_consumed_whole_or_not_at_all(buffer, path):
    first, second = fill(buffer, 0), fill(buffer, 1)
    buffer.expire([second.episode(1).episode_id])
    with pytest.raises(BufferStateError, match="one fate"):
        buffer.consume(1, episodes_of(first) | episodes_of(second))
    assert {state for state, _ in fates(path).values()} == {"pending", "expired"}
    buffer.consume(1, episodes_of(first))
    assert [fates(path)[e] for e in episodes_of(first)["g0"]] == [("consumed", 1)] * 2


def test_a_step_takes_one_batch_and_steps_do_not_go_back(buffer):
    first, second, third = fill(buffer, 0), fill(buffer, 1), fill(buffer, 2)
    buffer.consume(2, episodes_of(first))
    for step in (1, 2):
        with pytest.raises(BufferStateError, match="step 2 has taken one"):
            buffer.consume(step, episodes_of(second))
    buffer.consume(3, episodes_of(third))


def test_a_trajectory_is_not_consumed_twice(buffer):
    spec = fill(buffer, 0)
    buffer.consume(1, episodes_of(spec))
    with pytest.raises(BufferStateError, match="not ready"):
        buffer.consume(2, episodes_of(spec))


def test_failed_and_evaluation_episodes_are_kept_and_never_pending(buffer, path):
    spec = group(0)
    buffer.start_group(spec)
    buffer.store(trajectory(spec.episode(0), reward=None))
    buffer.store(trajectory(replace(spec.episode(1), split="test")), evaluation=True)
    assert [state for state, _ in fates(path).values()] == ["failed", "evaluation"]
    with BufferView(path) as view:
        assert view.episodes(state="failed")[0].failure_kind == "sandbox"
        assert [row.split for row in view.episodes(split="test")] == ["test"]


def test_a_probe_s_episodes_are_told_from_an_evaluation_s(buffer, path):
    for seq, kind in enumerate(("eval", "probe", "probe")):
        buffer.store(trajectory(replace(group(seq), group_id=f"{kind}.1.{seq}").episode(0)), evaluation=True)
    fill(buffer, 3)
    with BufferView(path) as view:
        assert view.counts() == {"evaluation": 1, "probe": 2, "pending": 2}
        assert [row.state for row in view.episodes()] == ["pending", "pending", "probe", "probe", "evaluation"]
        for state in ("evaluation", "probe", "pending"):
            rows = view.episodes(state=state)
            assert [row.state for row in rows] == [state] * view.counts()[state]
        assert {row.state for row in training_rows(view)} == {"pending"}


def test_resuming_gives_back_what_later_steps_consumed(buffer, path):
    specs = [fill(buffer, seq) for seq in range(3)]
    for step, spec in enumerate(specs, start=1):
        buffer.consume(step, episodes_of(spec))
    buffer.close()

    resumed = TrajectoryBuffer.open(path)
    assert resumed.begin(1) == 2
    assert [g.spec for g in resumed.ready_groups()] == specs[1:]
    assert [fates(path)[spec.episode(0).episode_id] for spec in specs] == [
        ("consumed", 1),
        ("pending", None),
        ("pending", None),
    ]
    resumed.consume(2, episodes_of(specs[2]))
    resumed.close()


def test_a_trajectory_knows_where_the_run_branched_off_since_it_was_sampled(path):
    for step in (0, 0, 0):  # three incarnations; the second trains to step 1, and the third resumes from there
        buffer = TrajectoryBuffer.open(path)
        buffer.begin(step)
        spec = fill(buffer, buffer.next_seq)
        buffer.close()
    buffer = TrajectoryBuffer.open(path)
    buffer.begin(0)
    buffer.consume(1, episodes_of(spec))
    buffer.close()
    buffer = TrajectoryBuffer.open(path)
    buffer.begin(1)
    newest = fill(buffer, buffer.next_seq)
    branches = {g.spec.seq: g.members[0].branch_step for g in buffer.ready_groups()}
    assert branches == {0: 0, 1: 0, newest.seq: None}
    buffer.close()


def test_a_group_in_flight_comes_back_with_the_members_it_lacks(buffer, path):
    spec = group(0, size=4)
    buffer.start_group(spec)
    buffer.store(trajectory(spec.episode(0)))
    buffer.store(trajectory(spec.episode(1), reward=None))
    buffer.store(trajectory(spec.episode(2, attempt=0), reward=None))
    buffer.store(trajectory(spec.episode(2, attempt=1), reward=None))
    buffer.close()

    resumed = TrajectoryBuffer.open(path)
    resumed.begin(0)
    (interrupted,) = resumed.interrupted_groups()
    assert interrupted.spec == spec
    assert list(interrupted.missing(attempts=2)) == [(1, 1), (3, 0)]
    assert len(interrupted.survivors) == 1
    assert resumed.next_seq == 1
    resumed.close()


def test_a_checkpoint_ahead_of_the_buffer_is_refused(buffer):
    buffer.consume(1, episodes_of(fill(buffer, 0)))
    with pytest.raises(BufferStateError, match="not of one run"):
        buffer.begin(2)
    assert buffer.begin(1) == 2


def pruned(path) -> dict[str, bool]:
    with BufferView(path) as view:
        return {row.episode_id: row.pruned for row in view.episodes(limit=-1)}


def test_pruning_forgets_what_was_trained_and_keeps_the_ledger(buffer, path):
    specs = [fill(buffer, seq) for seq in range(3)]
    for step, spec in enumerate(specs, 1):
        buffer.consume(step, episodes_of(spec))
        buffer.keep_trained_logprobs(step, {e: [np.zeros(3, np.float32)] for e in episodes_of(spec)[spec.group_id]})
    before = fates(path)
    with BufferView(path) as view:
        rewards = {row.episode_id: row.reward for row in view.episodes()}
    assert buffer.prune(2) == 4
    assert buffer.prune(2) == 0
    assert fates(path) == before
    assert {e for e, gone in pruned(path).items() if gone} == {e for s in specs[:2] for e in episodes_of(s)[s.group_id]}
    first, last = specs[0].episode(0).episode_id, specs[2].episode(0).episode_id
    with BufferView(path) as view:
        assert {row.episode_id: row.reward for row in view.episodes()} == rewards
        assert view.episode(first).action_tokens == 2
        assert view.trained_logprobs(first) is None
        with pytest.raises(BufferStateError, match=rf"{first} .*was pruned"):
            view.trajectory(first)
        assert view.trajectory(last).action_tokens == 2
        assert view.trained_logprobs(last) is not None
    assert len(buffer.group_rewards()) == 3


def test_pruning_covers_what_came_to_nothing_and_leaves_what_may_still_be_trained(buffer, path):
    dropped, expired, ready, young = group(0), fill(buffer, 1), fill(buffer, 2), group(4)
    in_flight = group(3)
    for spec, version in ((dropped, 0), (in_flight, 0), (young, 5)):
        buffer.start_group(spec)
        buffer.store(trajectory(spec.episode(0), version=version))
        buffer.store(trajectory(spec.episode(1), reward=None, version=version))
    buffer.drop_group(dropped.group_id, "no signal")
    buffer.drop_group(young.group_id, "no signal")
    buffer.expire(episodes_of(expired)["g1"], ["g1"])
    held_out = {version: group(9 + version) for version in (0, 5)}
    for version, spec in held_out.items():
        buffer.store(trajectory(spec.episode(0), version=version), evaluation=True)
    buffer.consume(5, episodes_of(fill(buffer, 5)))
    buffer.prune(4)
    forgotten = {episode_id.split(".")[0] for episode_id, gone in pruned(path).items() if gone}
    assert forgotten == {"g0", "g1", "g9"}
    assert [g.spec for g in buffer.ready_groups()] == [ready]
    buffer.close()
    resumed = TrajectoryBuffer.open(path)
    resumed.begin(4)
    assert [len(g.members) for g in resumed.interrupted_groups()] == [2]
    assert [g.spec.seq for g in resumed.ready_groups()] == [2, 5]
    resumed.close()


def test_a_resume_from_before_what_was_pruned_is_refused(buffer, path):
    for step in (1, 2, 3):
        buffer.consume(step, episodes_of(fill(buffer, step)))
    buffer.prune(2)
    buffer.close()
    resumed = TrajectoryBuffer.open(path)
    with pytest.raises(BufferStateError, match=r"at step 1, .*up to step 2 \(rollout.keep_steps\): resume from"):
        resumed.begin(1)
    assert resumed.begin(2) == 2
    assert [len(g.members) for g in resumed.ready_groups()] == [2]
    resumed.close()


def test_a_buffer_that_prunes_stops_growing(buffer, path):
    def play(first: int, last: int) -> int:
        for step in range(first, last):
            spec = group(step)
            buffer.start_group(spec)
            for member in range(2):
                told = trajectory(spec.episode(member), reward=float(member))
                noise = np.random.default_rng(step).bytes(20_000).hex()
                buffer.store(replace(told, messages=({"role": "user", "content": noise},)))
            buffer.accept_group(spec.group_id)
            buffer.consume(step, episodes_of(spec))
            buffer.prune(step - 2)
        buffer._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path.stat().st_size

    early = play(1, 10)
    assert play(10, 25) < early + 50_000  # 15 steps of 40 kB each


def test_dropping_a_group_drops_its_pending_members_alone(buffer, path):
    spec = group(0)
    buffer.start_group(spec)
    buffer.store(trajectory(spec.episode(0)))
    buffer.store(trajectory(spec.episode(1), reward=None))
    buffer.drop_group(spec.group_id, "failures")
    assert [state for state, _ in fates(path).values()] == ["dropped", "failed"]
    with pytest.raises(BufferStateError, match="not running"):
        buffer.accept_group(spec.group_id)


def test_an_expired_group_leaves_nothing_pending(buffer, path):
    spec = fill(buffer, 0)
    buffer.expire([spec.episode(0).episode_id], [spec.group_id])
    assert [state for state, _ in fates(path).values()] == ["expired", "dropped"]
    assert buffer.ready_groups() == []


def test_one_process_at_a_time_and_any_number_of_readers(buffer, path):
    with pytest.raises(BufferStateError, match=r"in use by process \d+: wait for it or stop it"):
        TrajectoryBuffer.open(path)
    spec = fill(buffer, 0)
    with BufferView(path) as one, BufferView(path) as two:
        assert one.ledger() == two.ledger()
        buffer.consume(1, episodes_of(spec))
        assert {row.state for row in two.ledger()} == {"consumed"}
    buffer.close()
    with BufferView(path) as after:  # and once the run is over
        assert len(after.ledger()) == 2
    TrajectoryBuffer.open(path).close()


@pytest.mark.slow
def test_a_forked_child_does_not_keep_the_run_from_its_next_process(path):
    """The parent dies while its child lives on; the child's end of the pipe shows that it does."""
    script = f"""
import os, sys, pathlib
from sparring.backend.buffer import TrajectoryBuffer
buffer = TrajectoryBuffer.open(pathlib.Path({str(path)!r}))
if os.fork() == 0:
    print("alive", flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"alive\n"
    assert process.wait(20) == -9
    TrajectoryBuffer.open(path).close()
    process.communicate()


def test_a_folder_that_cannot_be_made_is_an_error_with_advice(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BufferStateError, match="check run_dir"):
        TrajectoryBuffer.open(tmp_path / "file" / "buffer.db")


def test_a_full_disk_says_so_and_loses_nothing_stored(buffer, path):
    spec = group(0, size=400)
    buffer.start_group(spec)
    pages = buffer._connection.execute("PRAGMA page_count").fetchone()[0]
    buffer._connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    stored = []

    def store_all():
        for member in range(spec.size):
            buffer.store(trajectory(spec.episode(member)))
            stored.append(spec.episode(member).episode_id)

    with pytest.raises(BufferStateError, match="disk is full: free some space"):
        store_all()
    assert stored
    assert stored == list(fates(path))
    buffer._connection.execute("PRAGMA max_page_count = 1000000")
    buffer.store(trajectory(spec.episode(len(stored))))
    assert len(fates(path)) == len(stored) + 1


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_file_is_refused(path, content):
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(BufferStateError, match="damaged"):
        TrajectoryBuffer.open(path)
    with pytest.raises(BufferStateError, match="damaged"):
        BufferView(path)
    path.unlink()
    TrajectoryBuffer.open(path).close()  # the lease of the failed attempt is free


def test_damage_within_a_sound_header_is_found(buffer, path):
    for seq in range(40):
        fill(buffer, seq)
    buffer.close()
    content = bytearray(path.read_bytes())
    content[4096 * 8 : 4096 * 14] = np.random.default_rng(0).bytes(4096 * 6)
    path.write_bytes(content)
    with pytest.raises(BufferStateError, match="damaged"):
        TrajectoryBuffer.open(path)


def test_another_schema_is_refused_by_name(buffer, path):
    buffer.close()
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    connection.close()
    for opener in (TrajectoryBuffer.open, BufferView):
        with pytest.raises(BufferStateError, match="schema 99"):
            opener(path)


def test_a_missing_file_and_a_missing_episode_are_named(buffer, path):
    with pytest.raises(BufferStateError, match="cannot be opened"):
        BufferView(path.with_name("absent.db"))
    with BufferView(path) as view, pytest.raises(BufferStateError, match="no episode 'nobody'"):
        view.trajectory("nobody")


def test_a_view_cannot_write(buffer, path):
    with BufferView(path) as view, pytest.raises(BufferStateError):
        view._query("DELETE FROM trajectories")


def test_a_closed_buffer_says_so(buffer):
    buffer.close()
    buffer.close()
    with pytest.raises(BufferStateError, match="is closed"):
        buffer.start_group(group(0))
