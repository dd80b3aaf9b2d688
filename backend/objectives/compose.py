"""An objective from its parts: advantage × ratio × surrogate × correction × aggregation, and a KL term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sparring.backend.objectives.advantages import ADVANTAGES, discount_turns, filter_overlong
from sparring.backend.objectives.aggregation import AGGREGATIONS, constant
from sparring.backend.objectives.base import Advantage, LossInputs, LossOutputs, Metric, Objective, Prepare
from sparring.backend.objectives.correction import CORRECTIONS, Correction
from sparring.backend.objectives.kl import kl_term
from sparring.backend.objectives.ratio import RATIOS
from sparring.backend.objectives.surrogate import Surrogate
from sparring.errors import ConfigError

__all__ = ["Parts", "compose"]


@dataclass(frozen=True)
class Parts:
    """What an objective's name expands to. Any of them can be overridden in `objective.kwargs` but the surrogate.

    Attributes:
        advantage: a name in `advantages.ADVANTAGES`, or a function.
        surrogate: loss of a token.
        ratio: "token" or "sequence".
        against: the policy that the ratio is to: "behaviour", or "proximal" where corrections make up the rest.
        corrections: names, or {name: parameters}; weights of log(proximal/behaviour), multiplied.
        aggregation: "token_mean", "sequence_mean", or "constant" with `length`.
        kl: "k2" or "k3", with `kl_coefficient`, to the policy that training started from.
        reward_kl: coefficient of k1 in the reward.
        overlong_filter: episodes that ran out of turns or tokens get no advantage.
        turn_discount: the advantage of a turn is multiplied by it once for every turn after it.
        recompute_proximal: one more forward pass for the proximal policy; without, it is the current one.
    """

    advantage: str | Advantage
    surrogate: Surrogate
    ratio: str = "token"
    against: str = "behaviour"
    corrections: Sequence[str | Mapping[str, Mapping[str, float]]] = ()
    aggregation: str = "token_mean"
    length: int = 1024
    kl: str | None = None
    kl_coefficient: float = 0.0
    reward_kl: float = 0.0
    overlong_filter: bool = False
    turn_discount: float = 1.0
    recompute_proximal: bool = False


def compose(name: str, parts: Parts, overrides: Mapping[str, Any], *, prepare: Prepare | None = None) -> Objective:
    """Put the parts together, after `overrides`.

    Raises:
        ConfigError: a part has no such name.
        TypeError: there is no such part.
    """
    if "surrogate" in overrides:
        raise ConfigError(f"objective {name!r}: its surrogate is what it is; choose another objective instead")
    parts = replace(parts, **overrides)
    ratio = _pick(name, "ratio", RATIOS, parts.ratio)
    aggregate = _pick(name, "aggregation", AGGREGATIONS, parts.aggregation)
    if parts.aggregation == "constant":
        aggregate = constant(parts.length)
    if parts.against not in ("behaviour", "proximal"):
        raise ConfigError(f"objective {name!r}: against={parts.against!r} is neither 'behaviour' nor 'proximal'")
    corrections = [_correction(name, c) for c in parts.corrections]
    if corrections and parts.against == "behaviour":
        raise ConfigError(
            f"objective {name!r}: corrections weigh proximal/behaviour, which a ratio against the behaviour policy "
            "already holds; set against: proximal too"
        )
    penalty = kl_term(parts.kl) if parts.kl is not None else None
    advantage = parts.advantage
    if isinstance(advantage, str):
        advantage = _pick(name, "advantage", ADVANTAGES, advantage)
    if parts.turn_discount != 1.0:
        advantage = discount_turns(advantage, parts.turn_discount)
    if parts.overlong_filter:
        advantage = filter_overlong(advantage)

    def loss(x: LossInputs) -> LossOutputs:
        current = x.proximal if x.proximal is not None else x.logprobs.detach()
        old = x.behaviour if parts.against == "behaviour" else current
        per_token, metrics = parts.surrogate(x, ratio(x, old))
        metrics = dict(metrics)
        for correction in corrections:
            weight: Tensor = correction(x, current - x.behaviour)
            per_token = per_token * weight
            metrics["correction/kept"] = _share(weight != 0)
        if penalty is not None:
            divergence = penalty(x)
            metrics[f"kl/{parts.kl}_to_reference"] = (divergence.detach().sum(), divergence.new_tensor(len(divergence)))
            per_token = per_token + parts.kl_coefficient * divergence
        return LossOutputs(aggregate(x, per_token), metrics)

    return Objective(
        name,
        advantage,
        loss,
        prepare=prepare,
        needs_proximal=parts.recompute_proximal or prepare is not None,
        needs_reference=penalty is not None,
        reward_kl=parts.reward_kl,
        parts={
            "advantage": parts.advantage if isinstance(parts.advantage, str) else "its own",
            "ratio": f"{parts.ratio}, against {parts.against}",
            "corrections": ", ".join(str(c) for c in parts.corrections) or "none",
            "aggregation": parts.aggregation,
            "kl": " and ".join(filter(None, (parts.kl, "k1 in the reward" if parts.reward_kl else None))) or "none",
        },
    )


def _share(which: Tensor) -> Metric:
    return which.sum(), which.new_ones(which.shape).sum()


def _pick(objective: str, part: str, known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        raise ConfigError(f"objective {objective!r}: {part}={name!r} is unknown; there are {', '.join(known)}")
    return known[name]


def _correction(objective: str, spec: str | Mapping[str, Mapping[str, float]]) -> Correction:
    name, parameters = (spec, {}) if isinstance(spec, str) else next(iter(spec.items()))
    make = _pick(objective, "correction", CORRECTIONS, name)
    try:
        correction: Correction = make(**parameters)
    except TypeError as error:
        raise ConfigError(f"objective {objective!r}: correction {name!r}: {error}") from error
    return correction
