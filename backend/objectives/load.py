"""An objective by its name in the configuration: one of ours, or a function in a file of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparring.backend.objectives.base import Objective
from sparring.backend.objectives.cispo import cispo
from sparring.backend.objectives.dapo import dapo
from sparring.backend.objectives.decoupled_ppo import decoupled_ppo
from sparring.backend.objectives.default import default
from sparring.backend.objectives.dr_grpo import dr_grpo
from sparring.backend.objectives.gigpo import gigpo
from sparring.backend.objectives.grpo import grpo
from sparring.backend.objectives.gspo import gspo
from sparring.backend.objectives.m2po import m2po
from sparring.backend.objectives.ppo import ppo
from sparring.backend.objectives.reinforce_pp import reinforce_pp
from sparring.backend.objectives.rloo import rloo
from sparring.backend.objectives.sapo import sapo
from sparring.errors import ConfigError
from sparring.plugins import call_factory, load_attribute
from sparring.spelling import did_you_mean

__all__ = ["OBJECTIVES", "load_objective"]

OBJECTIVES: Mapping[str, Callable[..., Objective]] = {
    make.__name__: make
    for make in (default, grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo, cispo, sapo, m2po, gigpo, decoupled_ppo, ppo)
}


def load_objective(name: str, kwargs: Mapping[str, Any]) -> Objective:
    """Make the objective `name` with its parameters; 'file.py:function' is a user's, which returns an `Objective`.

    Raises:
        ConfigError: no such objective, the file has an error, or it does not take such a parameter.
    """
    make = load_attribute(name, "objective.name") if ":" in name else OBJECTIVES.get(name)
    if make is None:
        raise ConfigError(
            f"objective.name={name!r} is unknown{did_you_mean(name, OBJECTIVES) or '.'} "
            f"There are {', '.join(OBJECTIVES)}, or 'file.py:function'"
        )
    objective = call_factory(make, kwargs, f"objective.kwargs of {name!r}")
    if not isinstance(objective, Objective):
        raise ConfigError(f"objective.name={name!r} returned {type(objective).__name__}, not an Objective")
    return objective
