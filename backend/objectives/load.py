"""An objective by its name in the configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from sparring.backend.objectives.base import Objective
from sparring.backend.objectives.default import default
from sparring.errors import ConfigError

__all__ = ["OBJECTIVES", "load_objective"]

OBJECTIVES: Mapping[str, Callable[..., Objective]] = {"default": default}


def load_objective(name: str, kwargs: Mapping[str, Any]) -> Objective:
    """Make the objective `name` with its parameters.

    Raises:
        ConfigError: no such objective, or it does not take such a parameter.
    """
    make = OBJECTIVES.get(name)
    if make is None:
        near = difflib.get_close_matches(name, OBJECTIVES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"objective.name={name!r} is unknown: {hint}There are {', '.join(sorted(OBJECTIVES))}")
    try:
        return make(**kwargs)
    except TypeError as error:
        raise ConfigError(f"objective.kwargs of {name!r}: {error}") from error
