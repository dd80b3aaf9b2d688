"""What the picture of a run shows."""

import math

from sparring.curve import draw_curve, plot_curve
from sparring.evaluation import EvalSummary

EVALUATIONS = [EvalSummary(0, 8, 0, 0.25, 0.1, 0.5, -0.5), EvalSummary(4, 8, 0, 0.5, 0.2, 0.8, 1.5)]


def test_the_held_out_reward_is_drawn_beside_what_was_sampled_and_solved():
    (axes,) = draw_curve("a run", [1, 2, 3, 4], [0.1, math.nan, 0.3, 0.4], EVALUATIONS).axes
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert ([0, 4], [-0.5, 1.5]) in drawn
    assert ([0, 4], [0.25, 0.5]) in drawn
    assert [1, 2, 3, 4] in [steps for steps, _ in drawn]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        "mean reward of what was sampled",
        "mean reward of held-out tasks, greedy",
        "held-out tasks solved, greedy, 95% interval",
    ]


def test_rewards_outside_of_0_to_1_are_in_the_picture(tmp_path):
    (axes,) = draw_curve("a run", [1], [-2.0], EVALUATIONS).axes
    low, high = axes.get_ylim()
    assert low < -2.0
    assert high > 1.5
    (axes,) = draw_curve("a run", [1], [0.5], [EvalSummary(0, 8, 0, 0.5, 0.4, 0.6, 0.5)]).axes
    assert axes.get_ylim() == (-0.03, 1.03)
    plot_curve(tmp_path / "curve.png", "a run", [1], [-2.0], EVALUATIONS)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
