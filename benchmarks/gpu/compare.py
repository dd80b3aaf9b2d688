"""An asynchronous and a synchronous run of one configuration: equal samples, equal wall clock, time to an accuracy.

    python -m benchmarks.gpu.compare RESULTS.json          # the parts gsm8k and gsm8k_sync
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._report import Row, report
from benchmarks.gpu.gsm8k import seconds_to

__all__ = ["at", "compare"]


def compare(asynchronous: Mapping[str, Any], synchronous: Mapping[str, Any], unit: str = "") -> list[Row]:
    """Rows from two summaries of `gsm8k.summarise`. Between two evaluations their curve is taken as straight.

    Steps train on the same number of groups in both, so equal steps are equal samples.
    """
    fast, slow = asynchronous["evaluations"], synchronous["evaluations"]
    end = slow[-1]
    rows = [
        Row(f"{unit}η = 0 after {end['step']} steps, {end['steps_s']:.0f} s of them", 100 * end["success"], "%"),
        Row(f"{unit}η = 2 at equal samples", 100 * at(fast, "step", end["step"]), "%"),
        Row(f"{unit}η = 2 at equal wall clock", 100 * at(fast, "steps_s", end["steps_s"]), "%"),
    ]
    reached, once = seconds_to(fast, end["success"]), seconds_to(slow, end["success"])
    if reached and once:
        rows.append(Row(f"{unit}time to η = 0's last accuracy, η = 0 over η = 2", once / reached, "x"))
    return rows


def at(evaluations: Sequence[Mapping[str, Any]], axis: str, place: float) -> float:
    """The accuracy at `place` of `axis`; that of the last evaluation beyond it."""
    for before, after in pairwise(evaluations):
        if before[axis] <= place < after[axis]:
            share = (place - before[axis]) / (after[axis] - before[axis])
            return float(before["success"] + share * (after["success"] - before["success"]))
    return float(evaluations[-1]["success"] if place >= evaluations[-1][axis] else evaluations[0]["success"])


if __name__ == "__main__":
    parts = json.loads(Path(sys.argv[1]).read_text())["parts"]
    sys.exit(report("GSM8K", compare(parts["gsm8k"]["details"], parts["gsm8k_sync"]["details"])))
