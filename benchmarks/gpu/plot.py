"""Draw the curves of a results file: `python -m benchmarks.gpu.plot RESULTS.json docs/img`.

Writes `gsm8k_RESULTS.png` and `calculator_RESULTS.png`, of the parts that the file has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["draw_calculator", "draw_gsm8k"]

GSM8K = {
    "gsm8k": ("η = 2, 64 groups a step, 4e-6, MPS", "C0"),
    "gsm8k_earlier_lease": ("the same on an earlier lease", "C7"),
    "gsm8k_cut_short": ("the same at an earlier commit", "C6"),
    "gsm8k_sorting": ("the same, while SGLang sorted", "C5"),
    "gsm8k_before_fused_head": ("η = 2, 64 groups a step, 4e-6, time slices, before", "C4"),
    "gsm8k_32_groups": ("η = 2, 32 groups a step, 4e-6, MPS", "C2"),
    "gsm8k_32_groups_8e-6": ("η = 2, 32 groups a step, 8e-6, MPS", "C3"),
    "gsm8k_sync": ("η = 0, 64 groups a step, 4e-6", "C1"),
}
CALCULATOR = {"η = 2": ("asynchronous, η = 2", "C0"), "η = 0": ("synchronous, η = 0", "C1")}


def main(results: Path, folder: Path) -> None:
    parts = json.loads(results.read_text())["parts"]
    if any(name in parts for name in GSM8K):
        draw_gsm8k(parts, folder / f"gsm8k_{results.stem}.png")
    if "calculator" in parts:
        draw_calculator(parts["calculator"]["details"], folder / f"calculator_{results.stem}.png")


def draw_gsm8k(parts: Mapping[str, Any], image: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5))
    for name, (label, color) in GSM8K.items():
        if name not in parts:
            continue
        steps, evaluations = parts[name]["details"]["steps"], parts[name]["details"]["evaluations"]
        seconds = [step["steps_s"] for step in steps]
        rewards, speeds = ([step[key] for step in steps] for key in ("reward", "trainer/tokens_per_s"))
        left.plot(seconds, rewards, color=color, lw=0.8, alpha=0.6, label=f"sampled, {label}")
        right.plot(seconds, [speed / 1e3 for speed in speeds], color=color, marker=".", label=label)
        whole = [e for e in evaluations if e["episodes"] > 1000]
        middles = [e["success"] for e in whole]
        errors = [[e["success"] - e["low"] for e in whole], [e["high"] - e["success"] for e in whole]]
        if whole:
            left.errorbar(
                [e["steps_s"] for e in whole], middles, errors, fmt="s-", color=color, capsize=3,
                label=f"greedy, {whole[0]['episodes']:.0f} test problems",
            )  # fmt: skip
    left.set(xlabel="seconds of steps", ylabel="share solved")
    left.set_title("GSM8K, Qwen2.5-Coder-0.5B-Instruct, one H200")
    right.set(xlabel="seconds of steps", ylabel="thousand tokens a second, while it trains", title="the trainer")
    _finish(figure, (left, right), image)


def draw_calculator(found: Mapping[str, Any], image: Path) -> None:
    """Held-out accuracy of every seed, over steps (equal samples) and over seconds of steps."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    for kind, (label, color) in CALCULATOR.items():
        for i, run in enumerate(found[kind]):
            accuracies = [e["success"] for e in run["evaluations"]]
            errors = [[e["success"] - e["low"] for e in run["evaluations"]],
                      [e["high"] - e["success"] for e in run["evaluations"]]]  # fmt: skip
            for axis, key in zip(axes, ("step", "steps_s"), strict=True):
                axis.errorbar(
                    [e[key] for e in run["evaluations"]], accuracies, errors, color=color, marker="os^"[i % 3],
                    capsize=2, alpha=0.8, label=f"{label}, seed {run['seed']}",
                )  # fmt: skip
    axes[0].set(xlabel="optimizer steps", ylabel="held-out problems solved, greedy", ylim=(0, 1.03))
    axes[1].set(xlabel="seconds of steps, three seeds side by side")
    axes[0].set_title("Calculator, SmolLM2-135M-Instruct, one H200")
    _finish(figure, axes, image)


def _finish(figure: Any, axes: Any, image: Path) -> None:
    for each in axes:
        each.legend(fontsize=7, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))  # it would hide lines inside
        each.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(image, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
