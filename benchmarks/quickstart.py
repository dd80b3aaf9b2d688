"""The quickstart over several seeds: what it learns, how long it takes, and its memory, from the run's own files.

    python -m benchmarks.quickstart --seeds 0 1 2 3 4 --json benchmarks/results/quickstart.json

Peak memory is the proportional set size (shared pages divided among those who share them) of the run's process and all
its children, read once a second (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks._report import Row, report

CONFIG = "examples/quickstart.yaml"
TIMEOUT_S = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--json", dest="json_path")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    runs = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(arguments.config, seed, Path(folder), arguments.overrides))
        print(describe(runs[-1]), flush=True)
    rows = [
        Row("training time, worst seed", max(r["train_s"] for r in runs), "s", 300, at_most=True),
        Row("peak memory, worst seed", max(r["peak_gib"] for r in runs), "GiB", 6, at_most=True),
        Row("version lag, most", max(r["max_lag"] for r in runs), "updates", runs[0]["staleness"], at_most=True),
        Row("seeds whose intervals do not overlap", sum(r["apart"] for r in runs), "runs", len(runs)),
        Row("held-out accuracy before, mean", sum(r["before"]["success"] for r in runs) / len(runs), ""),
        Row("held-out accuracy after, mean", sum(r["after"]["success"] for r in runs) / len(runs), ""),
    ]
    kept = [{key: value for key, value in run.items() if key not in ("metrics", "conversation")} for run in runs]
    return report(f"{arguments.config}, {len(runs)} seeds", rows, arguments.json_path, {"runs": kept})


def run(config: str, seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run in a process of its own: its summary, the peak memory of its process tree, its steps' metrics."""
    command = [sys.executable, "-m", "sparring.cli", "train", config]
    command += [f"seed={seed}", f"run_dir={folder}/run", *overrides]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            peak = watch_memory(process)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        sys.exit(f"seed {seed} ended with {process.returncode}:\n" + (folder / "log").read_text()[-3000:])
    summary = json.loads((folder / "run" / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    return {**summary, "seed": seed, "peak_gib": peak / 2**30, "metrics": steps}


def watch_memory(process: subprocess.Popen[bytes]) -> int:
    """Peak bytes of the process tree, until the process ends.

    Raises:
        TimeoutError: it does not end.
    """
    peak, deadline = 0, time.monotonic() + TIMEOUT_S
    tree = psutil.Process(process.pid)
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run did not end in {TIMEOUT_S} s")
        peak = max(peak, tree_memory(tree))
        time.sleep(1)
    return peak


def tree_memory(root: psutil.Process) -> int:
    total = 0
    try:
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for member in members:
        try:
            rollup = Path(f"/proc/{member.pid}/smaps_rollup").read_text()
        except OSError:  # it has just ended
            continue
        total += next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return total


def describe(run: dict[str, Any]) -> str:
    def share(e: dict[str, Any]) -> str:
        return f"{e['success']:.1%} [{e['low']:.1%}, {e['high']:.1%}]"

    return (
        f"seed {run['seed']}: {share(run['before'])} -> {share(run['after'])}, training {run['train_s']:.0f} s, "
        f"whole run {run['wall_s']:.0f} s, peak {run['peak_gib']:.2f} GiB, version lag ≤ {run['max_lag']}"
    )


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    sys.exit(main())
