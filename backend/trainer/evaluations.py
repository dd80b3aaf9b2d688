"""Held-out evaluations of a run: when they are due, and what waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sparring.backend.trainer.protocols import PendingEvaluation, StartEvaluation
from sparring.config import RunConfig

__all__ = ["HeldOutEvaluations"]


class HeldOutEvaluations:
    """At most one evaluation at a time, each of the weights of one step.

    What is evaluated are the weights that the engine has, so somebody waits: the trainer (before its first step, after
    the last one, and always under `eval.during_training=stall`), or the engine's new weights (`hold`). Then the trainer
    goes on with what the old weights sample, as long as that is within the staleness bound.

    Args:
        report: takes the record of a finished evaluation.
    """

    def __init__(self, start: StartEvaluation, config: RunConfig, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._start = start
        self._every = config.eval.every
        self._beside = config.eval.during_training == "hold"
        self._staleness, self._last_step = config.rollout.staleness, config.trainer.steps
        self._report = report
        self._pending: PendingEvaluation | None = None
        self._step = self._trained_meanwhile = 0
        self._trains = False  # nothing is sampled for training yet
        self._began = 0.0

    def due(self, step: int) -> bool:
        """Whether the weights of `step` are to be evaluated, once they are live."""
        return step >= self._last_step or bool(self._every and step % self._every == 0)

    def begin(self, step: int) -> None:
        """Evaluate the weights of `step`, which are live: those that a run starts from, or those that are `due`. So a
        resume makes up for an evaluation that a kill has cost, and evaluates no step that nobody asked for."""
        if step > 0 and not self.due(step):
            return
        self.finish()
        beside = self._beside and self._trains and step < self._last_step
        self._step, self._trained_meanwhile, self._began = step, 0, time.perf_counter()
        self._pending = self._start(step, beside=beside)
        if not beside:
            self.finish()

    def count_step(self) -> bool:
        """A step was trained; whether it was beside an evaluation, which holds the engine's weights."""
        self._trains = True
        self._trained_meanwhile += 1
        return self._pending is not None

    def over(self, step: int, live_version: int) -> bool:
        """After step `step`: whether the engine may have new weights. Waits for the evaluation where training cannot go
        on without them: by the staleness bound, or because the next evaluation is due."""
        assert self._pending is not None
        if self._pending.done() or self.due(step) or step - live_version > self._staleness:
            self.finish()
        return self._pending is None

    def finish(self) -> None:
        """Wait for the evaluation in hand, if there is one, and report it."""
        if self._pending is None:
            return
        result = self._pending.result()
        self._pending = None
        record = {"step": self._step, "kind": "evaluation", **result}
        seconds = round(time.perf_counter() - self._began, 4)
        self._report(record | {"steps_meanwhile": self._trained_meanwhile, "time/evaluate_s": seconds})
