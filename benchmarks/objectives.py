"""Every objective on the tests' fast model: final reward with its interval over seeds, and seconds a training step.

    python -m benchmarks.objectives [--objectives NAME ...] [--seeds 0 1 2] [--steps 40] [--json FILE]

One supervised warm start (examples/tiny.yaml), then each objective goes on from it for the same steps, in runs of their
own. The reward is the mean over the last quarter of the steps, sampled, as the rollouts earned it; its 95% interval is
Student's over seeds. Twelve objectives and three seeds take about an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._report import Row, report
from benchmarks.quickstart import run
from sparring.backend.objectives import OBJECTIVES

CONFIG = "examples/tiny.yaml"
# Student's t at 97.5% by degrees of freedom.
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", dest="json_path")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    rows, runs = [], {}
    with tempfile.TemporaryDirectory() as folder:
        start = warm_start(Path(folder), arguments.overrides)
        for name in arguments.objectives:
            results = []
            for seed in arguments.seeds:
                overrides = [
                    f"objective.name={name}", f"model.path={start}", "warm_start.steps=0",
                    f"trainer.steps={arguments.steps}", "eval.every=0", "eval.tasks=32", *arguments.overrides,
                ]  # fmt: skip
                with tempfile.TemporaryDirectory() as own:
                    results.append(measure(run(CONFIG, seed, Path(own), overrides)))
            runs[name] = results
            print(name, results, flush=True)
    table = Table("objective", "before", "reward, last quarter", "95% over seeds", "s a step", box=None)
    for name, results in runs.items():
        rewards = [r["reward"] for r in results]
        mean, half = statistics.mean(rewards), interval(rewards)
        seconds = statistics.median(r["step_s"] for r in results)
        before = statistics.mean(r["before"] for r in results)
        table.add_row(name, f"{before:.3f}", f"{mean:.3f}", f"± {half:.3f}", f"{seconds:.2f}")
        rows += [Row(f"{name}: reward", mean, ""), Row(f"{name}: training step", seconds, "s")]
    Console(width=120).print(table)
    details = {"seeds": arguments.seeds, "steps": arguments.steps, "runs": runs}
    return report(f"objectives on {CONFIG}", rows, arguments.json_path, details)


def warm_start(folder: Path, overrides: Sequence[str]) -> Path:
    """The model after the supervised steps alone, with the template that it learnt."""
    result = run(CONFIG, 0, folder, ["trainer.steps=1", "eval.every=0", "eval.tasks=1", *overrides])
    assert result["steps"] == 1
    return folder / "run" / "warm_start"


def measure(result: dict[str, Any]) -> dict[str, float]:
    """Reward at both ends of a run, and the trainer's own seconds a step."""
    steps = result["metrics"]
    quarter = max(1, len(steps) // 4)
    busy = ("time/train_s", "time/first_pass_s", "time/optimizer_s")
    return {
        "before": statistics.mean(s["reward"] for s in steps[:2]),
        "reward": statistics.mean(s["reward"] for s in steps[-quarter:]),
        "step_s": statistics.median(sum(s.get(name, 0.0) for name in busy) for s in steps),
    }


def interval(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean; infinite for one value."""
    n = len(values)
    if n < 2:
        return math.inf
    return _STUDENT.get(n - 1, 1.96) * statistics.stdev(values) / math.sqrt(n)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    sys.exit(main())
