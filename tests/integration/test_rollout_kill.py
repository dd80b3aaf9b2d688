"""`kill -9` or Ctrl-C at any moment: each trajectory is consumed once in the surviving history, and none is lost."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sparring.backend.buffer import BufferView

FOR_EVER = 10**9


def start(folder: Path, last_step: int) -> subprocess.Popen:
    script = Path(__file__).with_name("rollout_process.py")
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), str(last_step)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def history(folder: Path) -> dict[int, list[str]]:
    saved = folder / "checkpoint.json"
    return {int(step): ids for step, ids in json.loads(saved.read_text()).items()} if saved.exists() else {}


def consumed(folder: Path) -> dict[int, list[str]]:
    steps: dict[int, list[str]] = {}
    with BufferView(folder / "buffer.db") as view:
        for row in view.ledger():
            if row.consumed_step is not None:
                steps.setdefault(row.consumed_step, []).append(row.episode_id)
    return steps


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("end", "times"), [(signal.SIGKILL, 20), (signal.SIGINT, 6)])
def test_ends_at_random_moments_lose_nothing_and_repeat_nothing(tmp_path, end, times):
    dice = random.Random(0)
    for _ in range(times):
        process = start(tmp_path, FOR_EVER)
        try:
            assert process.stdout.readline().startswith(b"resumed at"), process.stderr.read().decode()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=dice.uniform(0.0, 0.3))
            process.send_signal(end)
            _, errors = process.communicate(timeout=20)
            assert process.returncode == -end, errors.decode()
            assert b"ERROR" not in errors
            assert b"not shut down" not in errors
        finally:
            process.kill()
            process.communicate()
        ledger = consumed(tmp_path)
        for step, episode_ids in history(tmp_path).items():
            assert sorted(ledger[step]) == sorted(episode_ids), f"step {step} after {end!r}"

    last_step = len(history(tmp_path)) + 6
    process = start(tmp_path, last_step)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()

    surviving = history(tmp_path)
    assert list(surviving) == list(range(1, last_step + 1))
    assert {step: sorted(ids) for step, ids in surviving.items()} == {
        step: sorted(ids) for step, ids in consumed(tmp_path).items()
    }
    times_trained = Counter(episode_id for ids in surviving.values() for episode_id in ids)
    assert set(times_trained.values()) == {1}

    with BufferView(tmp_path / "buffer.db") as view:
        trained = view.episodes(state="consumed", limit=-1)
        fates = {row.episode_id: row.state for row in view.ledger()}
        groups = view.group_states()
        incarnations = max(row.incarnation for row in view.ledger())
    assert all(row.pruned for row in trained), "a kill left tokens behind that the last checkpoint's step pruned"
    witnessed = (tmp_path / "stored.log").read_text().split()
    assert len(witnessed) == len(set(witnessed)), "an episode was stored twice"
    assert set(witnessed) <= fates.keys(), "an accepted episode was lost"
    assert len(fates.keys() - set(witnessed)) <= times, "at most the episode in the kill's way lacks its witness"
    assert list(groups) == [f"g{seq:07d}" for seq in range(len(groups))], "a drawn task was lost"
    assert {fates[e] for e in witnessed} <= {"consumed", "dropped", "expired", "failed", "pending"}
    assert {"consumed", "dropped", "failed"} <= set(fates.values()), "the run did not meet every fate"
    assert incarnations > times // 2
