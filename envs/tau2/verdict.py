"""The reward of a finished conversation, as upstream's evaluators give it.

Upstream replays the whole conversation in a new environment and hashes two databases. Its tools are functions of the
state, so the conversation's own world is in the state that the replay would reach, and two databases that were forked
from one need a look only where either was touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sparring.envs.tau2.transcript import Call, Entry, calls
from sparring.envs.tau2.world import World, same_state

__all__ = ["Verdict", "evaluate", "premature"]


@dataclass(frozen=True)
class Verdict:
    """What upstream's `RewardInfo` holds.

    Attributes:
        breakdown: components that count for this task and their rewards; `reward` is their product.
        db_match, env_assertions, actions, communicated, nl_assertions: every single check that was made, whether it
            counts or not, in the order of the task's criteria.
        note: why there is nothing to check.
        error: the exception on which upstream's evaluator ends, such as an assertion about a record that does not
            exist. Upstream then scores the sample 0, if it is told to go on at all.
    """

    reward: float
    breakdown: dict[str, float]
    db_match: bool | None = None
    env_assertions: tuple[bool, ...] = ()
    actions: tuple[bool, ...] = ()
    communicated: tuple[bool, ...] = ()
    nl_assertions: tuple[bool, ...] | None = None
    note: str = ""
    error: str = ""

    @property
    def parts(self) -> dict[str, float]:
        """Every component that was evaluated, those that do not count for this task included."""
        parts = dict(self.breakdown)
        if self.db_match is not None:
            parts.setdefault("DB", float(self.db_match))
        for name, checks in (
            ("ENV_ASSERTION", self.env_assertions),
            ("ACTION", self.actions),
            ("COMMUNICATE", self.communicated),
            ("NL_ASSERTION", self.nl_assertions),
        ):
            if checks:
                parts.setdefault(name, float(all(checks)))
        return parts


def premature(reason: str) -> Verdict:
    """The verdict on a conversation that neither side ended: 0."""
    return Verdict(0.0, {}, note=f"Simulation terminated prematurely. Termination reason: {reason}")


def evaluate(
    task: Any, world: World, gold: World, entries: Sequence[Entry], nl_assertions: tuple[bool, ...] | None = None
) -> Verdict:
    """Score a conversation that the user or the agent ended.

    Args:
        task: upstream's `Task`.
        world: the state at the end; assertions run on it.
        gold: the state after the gold actions, from the same start.
        nl_assertions: a judge's answers, where there was one.
    """
    criteria = task.evaluation_criteria
    if criteria is None:
        return Verdict(1.0, {}, note="No evaluation criteria")
    basis = [str(getattr(part, "value", part)) for part in criteria.reward_basis]
    computed: dict[str, float] = {}
    if criteria.actions is None and criteria.env_assertions is None:
        db_match, assertions = True, ()
    else:
        db_match = same_state(world, gold)
        try:
            assertions = tuple(
                world.environment.run_env_assertion(assertion, raise_assertion_error=False)
                for assertion in criteria.env_assertions or ()
            )
        except Exception as error:
            return Verdict(0.0, {}, error=type(error).__name__, note=str(error))
        computed |= {"DB": float(db_match), "ENV_ASSERTION": float(all(assertions))}
    actions = _actions_taken(criteria.actions or (), list(calls(entries)))
    communicated = _facts_said(criteria.communicate_info or (), entries)
    computed |= {"ACTION": float(all(actions)), "COMMUNICATE": float(all(communicated))}
    if nl_assertions is not None:
        computed["NL_ASSERTION"] = float(all(nl_assertions))
    breakdown = {part: computed[part] for part in basis if part in computed}
    reward = 1.0
    for value in breakdown.values():
        reward *= value
    return Verdict(reward, breakdown, db_match, assertions, actions, communicated, nl_assertions)


def _actions_taken(gold: Iterable[Any], made: Sequence[Call]) -> tuple[bool, ...]:
    """Upstream compares name and arguments, not who called: `Action.compare_with_tool_call` reads just those."""
    return tuple(any(action.compare_with_tool_call(call) for call in made) for action in gold)


def _facts_said(facts: Sequence[str], entries: Iterable[Entry]) -> tuple[bool, ...]:
    """Whether the agent said each fact, without regard to case or to commas in what it said."""
    if not facts:
        return ()
    said = [entry.content.lower().replace(",", "") for entry in entries if entry.role == "assistant" and entry.content]
    return tuple(any(fact.lower() in text for text in said) for fact in facts)
