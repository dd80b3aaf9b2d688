"""Asynchronous against synchronous training, the same configuration otherwise: steps a minute, and who waits for whom.

    python -m benchmarks.async_vs_sync --repeats 2 --json benchmarks/results/async_vs_sync.json

On a machine whose cores both sides share, an asynchronous run can win only what a synchronous one leaves idle; so the
synchronous run is timed with one thread a side, as the asynchronous one, and with all cores for whichever side works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import Row, report
from benchmarks.quickstart import CONFIG, run

_CORES = os.cpu_count() or 1
_VARIANTS = {
    "η = 2, one thread a side": ("rollout.staleness=2", "engine.threads=1", "trainer.threads=1"),
    "η = 0, one thread a side": ("rollout.staleness=0", "engine.threads=1", "trainer.threads=1"),
    f"η = 0, {_CORES} threads a side": (
        "rollout.staleness=0",
        f"engine.threads={_CORES}",
        f"trainer.threads={_CORES}",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each variant, in turn")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--json", dest="json_path")
    arguments = parser.parse_args()
    common = (f"trainer.steps={arguments.steps}", "trainer.checkpoint_every=0", "eval.every=0", "eval.tasks=1")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in _VARIANTS}
    for repeat in range(arguments.repeats):
        for name, overrides in _VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                runs[name].append(run(arguments.config, repeat, Path(folder), (*common, *overrides)))
    rows = [row for name, of_variant in runs.items() for row in _rows(name, of_variant)]
    first = next(iter(_VARIANTS))
    for name in list(_VARIANTS)[1:]:
        ratios = [_rate(a) / _rate(b) for a, b in zip(runs[first], runs[name], strict=True)]
        rows.append(Row(f"steps a minute, {first} over {name}", statistics.median(ratios), "x"))
    return report(f"{arguments.config}, {arguments.steps} steps, {_CORES} cores", rows, arguments.json_path)


def _rows(name: str, runs: Sequence[dict[str, Any]]) -> list[Row]:
    steps = [record for one in runs for record in one["metrics"]]

    def mean(key: str) -> float:
        return statistics.mean(record[key] for record in steps)

    return [
        Row(f"{name}: steps", statistics.median(map(_rate, runs)), "a minute"),
        Row(f"{name}: sampler busy", 100 * mean("sampler/busy"), "%"),
        Row(f"{name}: trainer busy", 100 * mean("trainer/busy"), "%"),
    ]


def _rate(run: dict[str, Any]) -> float:
    return 60 * run["steps"] / run["train_s"]


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    sys.exit(main())
