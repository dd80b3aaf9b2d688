"""Draw the GSM8K curves of a results file: `python -m benchmarks.gpu.plot RESULTS.json docs/img/gsm8k_h200.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SERIES = {"gsm8k": ("asynchronous, η = 2", "C0"), "gsm8k_sync": ("synchronous, η = 0", "C1")}


def main(results: Path, image: Path) -> None:
    parts = json.loads(results.read_text())["parts"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for name, (label, color) in SERIES.items():
        if name not in parts:
            continue
        steps, evaluations = parts[name]["details"]["steps"], parts[name]["details"]["evaluations"]
        seconds = [step["steps_s"] for step in steps]
        left.plot(seconds, [step["reward"] for step in steps], color=color, marker=".", label=f"sampled, {label}")
        right.plot(seconds, [step["tokens/trained"] / 1e3 for step in steps], color=color, marker=".", label=label)
        whole = [e for e in evaluations if e["episodes"] > 1000]
        middles = [e["success"] for e in whole]
        errors = [[e["success"] - e["low"] for e in whole], [e["high"] - e["success"] for e in whole]]
        if whole:
            left.errorbar(
                [e["steps_s"] for e in whole], middles, errors, fmt="s", color=color, capsize=3,
                label=f"greedy, {whole[0]['episodes']:.0f} test problems, {label}",
            )  # fmt: skip
    left.set(xlabel="seconds of steps", ylabel="share solved", title="GSM8K, Qwen2.5-Coder-0.5B-Instruct, one H200")
    right.set(xlabel="seconds of steps", ylabel="thousand tokens trained in a step", ylim=(0, None))
    for axes in (left, right):
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(image, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
