"""Objectives as pure functions: `load_objective(ObjectiveConfig)` gives an advantage and a loss under one name."""

from sparring.backend.objectives.base import LossInputs, LossOutputs, Objective, Totals
from sparring.backend.objectives.load import load_objective

__all__ = ["LossInputs", "LossOutputs", "Objective", "Totals", "load_objective"]
