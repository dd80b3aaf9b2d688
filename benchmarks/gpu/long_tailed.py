"""A long-tailed workload of slow tools, asynchronous against synchronous: who waits for whom, and what comes through.

The environment is `slow_service`: 1 to 20 turns, each behind a real delay. The runs are the same but for the staleness,
and their rates leave out the first step, in which kernels compile.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import yaml

from benchmarks._report import Row
from benchmarks.gpu.gsm8k import engine_overrides, run_command, summarise

GROUP_SIZE, GROUPS_PER_STEP, STALENESS = 8, 16, 2
SECONDS = {2: 45.0, 0: 70.0}  # of steps; a synchronous step takes longer, and a few are needed


def config(model: str, **environment: Any) -> dict[str, Any]:
    return {
        "model": {"path": model, "max_length": 1024},
        "env": {"id": "benchmarks.gpu.slow_service:benchmarks/SlowService-v0", "kwargs": environment},
        "engine": {"type": "sglang"},
        "sampling": {"temperature": 1.0, "max_new_tokens": 20},
        "rollout": {
            "group_size": GROUP_SIZE,
            "groups_per_step": GROUPS_PER_STEP,
            "max_running_groups": (STALENESS + 1) * GROUPS_PER_STEP,
            "max_turns": 20,
        },
        "trainer": {"steps": 1000, "learning_rate": 1e-7, "token_budget": 16384, "threads": 4, "checkpoint_every": 0},
        "eval": {"every": 0, "tasks": 1},
    }


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    out.mkdir(parents=True, exist_ok=True)
    file = out / "long_tailed.yaml"
    file.write_text(yaml.safe_dump(config(os.environ["SPARRING_BENCH_MODEL"])))
    found = {}
    for staleness in (STALENESS, 0):
        folder = out / f"eta{staleness}"
        overrides = [f"rollout.staleness={staleness}", *engine_overrides()]
        records = run_command(str(file), folder, overrides, seconds_of_steps=SECONDS[staleness])
        found[f"η = {staleness}"] = summarise(records, skip=1) | {"episodes": lengths(folder / "buffer.sqlite")}
    return report(found)


def report(found: dict[str, Any]) -> tuple[list[Row], dict[str, Any]]:
    rows = []
    for name, run in found.items():
        shares = run["episodes"]
        rows += [
            Row(f"{name}: trajectories", run["episodes_per_s"], "/s"),
            Row(f"{name}: sampler busy", run["sampler_busy"] * 100, "%"),
            Row(f"{name}: trainer busy", run["trainer_busy"] * 100, "%"),
            Row(f"{name}: a step", run["step_s"], "s"),
            Row(f"{name}: turns an episode, mean", shares["turns_mean"], ""),
            Row(f"{name}: seconds an episode, mean", shares["seconds_mean"], "s"),
            Row(f"{name}: seconds an episode, coefficient of variation", shares["seconds_cv"], ""),
        ]
    asynchronous, synchronous = (found[f"η = {staleness}"]["episodes_per_s"] for staleness in (STALENESS, 0))
    rows.append(Row("trajectories, η = 2 over η = 0", asynchronous / synchronous, "x", 2.0))
    return rows, found


def lengths(buffer: Path) -> dict[str, float]:
    """Turns and seconds of the training episodes that came to their end."""
    from sparring.backend.buffer import BufferView

    with BufferView(buffer) as view:
        episodes = [e for e in view.episodes(split="train", limit=-1) if e.failure_kind is None]
    turns, seconds = [e.turns for e in episodes], [e.finished_at - e.started_at for e in episodes]
    return {
        "n": len(episodes),
        "turns_mean": statistics.mean(turns),
        "turns_cv": statistics.pstdev(turns) / statistics.mean(turns),
        "turns_max": max(turns),
        "seconds_mean": statistics.mean(seconds),
        "seconds_cv": statistics.pstdev(seconds) / statistics.mean(seconds),
        "seconds_max": max(seconds),
    }
