"""The picture that a run leaves: reward of the training episodes, reward and success on held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.evaluation import EvalSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_curve", "plot_curve"]


def plot_curve(
    path: Path, title: str, steps: Sequence[int], rewards: Sequence[float], evaluations: Sequence[EvalSummary]
) -> None:
    """Write what `draw_curve` draws as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(draw_curve(title, steps, rewards, evaluations)).print_png(str(path))


def draw_curve(
    title: str, steps: Sequence[int], rewards: Sequence[float], evaluations: Sequence[EvalSummary]
) -> Figure:
    """`rewards[i]` is the mean reward of the episodes that ended before step `steps[i]`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="tab:blue", alpha=0.7, label="mean reward of what was sampled")
    evaluated = [e.step for e in evaluations]
    held_out = [e.reward for e in evaluations]
    label = "mean reward of held-out tasks, greedy"
    axes.plot(evaluated, held_out, color="tab:blue", linestyle="--", marker="x", label=label)
    axes.errorbar(
        evaluated,
        [e.success for e in evaluations],
        yerr=[[e.success - e.low for e in evaluations], [e.high - e.success for e in evaluations]],
        color="tab:green",
        marker="o",
        capsize=4,
        label="held-out tasks solved, greedy, 95% interval",
    )
    low, high = axes.get_ylim()
    axes.set(title=title, xlabel="optimizer step", ylim=(min(low, -0.03), max(high, 1.03)))  # rewards may leave [0, 1]
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return figure
