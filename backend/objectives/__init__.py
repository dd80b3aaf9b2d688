"""Objectives as pure functions: `load_objective(name, kwargs)` gives an advantage and a loss under one name.

A user's own is built from the same parts: `compose(name, Parts(...), {})`, or an `Objective` from scratch.
"""

from sparring.backend.objectives.base import LossInputs, LossOutputs, Metric, Objective, Totals
from sparring.backend.objectives.compose import Parts, compose
from sparring.backend.objectives.load import OBJECTIVES, load_objective

__all__ = [
    "OBJECTIVES",
    "LossInputs",
    "LossOutputs",
    "Metric",
    "Objective",
    "Parts",
    "Totals",
    "compose",
    "load_objective",
]
