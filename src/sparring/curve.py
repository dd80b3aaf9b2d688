"""The picture that a run leaves: reward of the training episodes, success on held-out tasks with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparring.evaluation import EvalSummary

__all__ = ["plot_curve"]


def plot_curve(
    path: Path, title: str, steps: Sequence[int], rewards: Sequence[float], evaluations: Sequence[EvalSummary]
) -> None:
    """Write a PNG. `rewards[i]` is the mean reward of the episodes that ended before step `steps[i]`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="tab:blue", alpha=0.7, label="mean reward of what was sampled")
    axes.errorbar(
        [e.step for e in evaluations],
        [e.success for e in evaluations],
        yerr=[[e.success - e.low for e in evaluations], [e.high - e.success for e in evaluations]],
        color="tab:green",
        marker="o",
        capsize=4,
        label="held-out tasks solved, greedy, 95% interval",
    )
    axes.set(title=title, xlabel="optimizer step", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(str(path))
