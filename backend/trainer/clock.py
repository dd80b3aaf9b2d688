"""Where the time of a training step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StepClock"]


class StepClock:
    """Seconds of a step, by phase. What lies in no phase counts to the step alone."""

    def __init__(self) -> None:
        self._began = 0.0
        self._phase_began: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def restart(self) -> None:
        """A step begins."""
        self._seconds.clear()
        self._began = time.perf_counter()

    def start(self, phase: str) -> None:
        self._phase_began[phase] = time.perf_counter()

    def stop(self, phase: str) -> None:
        self._seconds[phase] += time.perf_counter() - self._phase_began.pop(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is done in here counts to no step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - began

    def record(self, tokens: float) -> dict[str, float]:
        """The step's times, and the trainer's speed over the `tokens` that it forwarded."""
        waited = self._seconds["wait"]
        busy = sum(self._seconds.values()) - waited - self._seconds.get("held", 0.0)
        return {
            **{f"time/{name}_s": round(s, 4) for name, s in self._seconds.items()},
            "time/step_s": round(time.perf_counter() - self._began, 4),
            "trainer/tokens_per_s": tokens / max(self._seconds["train"], 1e-9),
            "trainer/busy": busy / max(busy + waited, 1e-9),
        }
