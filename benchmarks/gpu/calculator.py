"""SmolLM2-135M learns the calculator on one GPU: three seeds, asynchronously and synchronously, the embedded engine.

The runs are `sparring train examples/quickstart.yaml`, the file that runs on two CPU cores, on a GPU by `device=auto`.
The three seeds of a kind run side by side, since one of them leaves most of the GPU idle: their seconds are comparable
with each other, and are no best times.
"""

from __future__ import annotations

import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._report import Row
from benchmarks.gpu.compare import at
from benchmarks.gpu.gsm8k import run_command, seconds_to, summarise

CONFIG = "examples/quickstart.yaml"
SEEDS = (0, 1, 2)
TIMEOUT_S = 210.0  # of a run; the two kinds follow each other
OVERRIDES = ["engine.slots=128", "trainer.checkpoint_every=0", "trainer.token_budget=8192", "trainer.threads=2",
             "eval.every=5", "eval.tasks=256"]  # fmt: skip


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    overrides = [*OVERRIDES, *os.environ.get("SPARRING_BENCH_CALCULATOR", "").split()]
    found: dict[str, Any] = {"overrides": overrides}
    for staleness in (2, 0):
        with ThreadPoolExecutor(len(SEEDS)) as threads:
            runs = [threads.submit(_run, out / f"eta{staleness}-seed{s}", staleness, s, overrides) for s in SEEDS]
            found[f"η = {staleness}"] = [run.result() for run in runs]
    return report(found), found


def report(found: dict[str, Any]) -> list[Row]:
    """Over the seeds of each kind; runs that were ended early are compared at the last step that all were evaluated at.

    The ratio is of the times until the curves first reach what the synchronous run of the same seed had at that step.
    """
    rows = []
    steps = {name: min(run["evaluations"][-1]["step"] for run in found[name]) for name in ("η = 2", "η = 0")}
    for name, end in steps.items():
        runs = found[name]
        first, last = ([100 * at(run["evaluations"], "step", step) for run in runs] for step in (0, end))
        rows += [
            Row(f"{name}: accuracy before, mean of {len(runs)} seeds", statistics.mean(first), "%"),
            Row(f"{name}: accuracy after {end} steps, mean", statistics.mean(last), "%"),
            Row(f"{name}: accuracy after {end} steps, the worst seed", min(last), "%"),
            Row(f"{name}: seconds of {end} steps, mean", statistics.mean(_seconds(run, end) for run in runs), "s"),
            Row(f"{name}: trajectories, mean", statistics.mean(run["episodes_per_s"] for run in runs), "/s"),
        ]
    end = steps["η = 0"]
    pairs = list(zip(found["η = 2"], found["η = 0"], strict=True))
    samples = [100 * at(fast["evaluations"], "step", end) for fast, _ in pairs]
    clock = [100 * at(fast["evaluations"], "steps_s", _seconds(slow, end)) for fast, slow in pairs]
    rows.append(Row(f"η = 2 at equal samples ({end} steps), mean", statistics.mean(samples), "%"))
    rows.append(Row(f"η = 2 at equal wall clock (η = 0's {end} steps), mean", statistics.mean(clock), "%"))
    ratios = [_ratio(fast["evaluations"], slow["evaluations"], end) for fast, slow in pairs]
    if known := [ratio for ratio in ratios if ratio is not None]:
        rows.append(Row(f"time to η = 0's accuracy after {end} steps, η = 0 over η = 2", statistics.median(known), "x"))
    return rows


def _seconds(run: dict[str, Any], step: int) -> float:
    return float(run["steps"][step - 1]["steps_s"])


def _ratio(fast: list[dict[str, Any]], slow: list[dict[str, Any]], step: int) -> float | None:
    goal = at(slow, "step", step)
    reached, once = seconds_to(fast, goal), seconds_to(slow, goal)
    return once / reached if reached and once else None


def _run(folder: Path, staleness: int, seed: int, overrides: list[str]) -> dict[str, Any]:
    chosen = [f"rollout.staleness={staleness}", f"seed={seed}", *overrides]
    return summarise(run_command(CONFIG, folder, chosen, timeout_s=TIMEOUT_S)) | {"seed": seed}
