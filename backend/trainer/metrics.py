"""What a step tells about itself: sums on the device while it runs, one dict of floats at its end, one JSON line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparring.backend.objectives.base import LossInputs, Metric
from sparring.errors import TrainerError

__all__ = ["MetricsFile", "StepMeter"]


class StepMeter:
    """Sums, counts and maxima over the micro-batches of one step; nothing leaves the device before `reduce`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        for name, (total, count) in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + total.detach().double()
            self._counts[name] = self._counts.get(name, 0.0) + count.detach().double()

    @torch.no_grad()
    def observe(self, x: LossInputs, entropy: Tensor) -> None:
        """Diagnostics that do not depend on the objective. `entropy` is (M,)."""
        log_ratio = (x.logprobs - x.behaviour).double()
        ratio = log_ratio.exp()
        one = torch.ones_like(ratio)
        n = one.sum()
        self.add(
            {
                "ratio/mean": (ratio.sum(), n),
                "ratio/square": (ratio.square().sum(), n),
                "kl/k3": ((ratio - 1 - log_ratio).sum(), n),
                "entropy": (entropy.sum(), n),
            }
        )
        drift = log_ratio.abs()
        for lag in x.lags.unique().tolist():
            of_lag = x.lags == lag
            self.add({f"drift/mean/lag{lag}": (drift[of_lag].sum(), of_lag.sum())})
            self._maximum(f"drift/max/lag{lag}", drift[of_lag].max())
        self._maximum("ratio/max", ratio.max())

    def reduce(self, gathered: list[dict[str, dict[str, float]]] | None = None) -> dict[str, float]:
        """The step's numbers. `gathered` are the `state` of all ranks; None: this one alone."""
        states = gathered or [self.state()]
        total: dict[str, float] = {}
        count: dict[str, float] = {}
        out: dict[str, float] = {}
        for state in states:
            for name, value in state["sums"].items():
                total[name] = total.get(name, 0.0) + value
                count[name] = count.get(name, 0.0) + state["counts"][name]
            for name, value in state["maxima"].items():
                out[name] = max(out.get(name, value), value)
        out |= {name: total[name] / count[name] for name in total if count[name]}
        if (square := out.pop("ratio/square", None)) is not None:
            # Kish's effective sample size as a share of the tokens: 1 where all weights are equal
            out["ess"] = out["ratio/mean"] ** 2 / square
        out |= {
            name.replace("drift/mean/", "tokens/"): n for name, n in count.items() if name.startswith("drift/mean/")
        }
        return out

    def state(self) -> dict[str, dict[str, float]]:
        """Plain numbers, to send between ranks."""
        return {
            key: {name: float(value) for name, value in tensors.items()}
            for key, tensors in (("sums", self._sums), ("counts", self._counts), ("maxima", self._maxima))
        }

    def _maximum(self, name: str, value: Tensor) -> None:
        value = value.double()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value


class MetricsFile:
    """`metrics.jsonl`: one record a line, in the order of steps, flushed as written.

    Attributes:
        rewards: held-out reward by the step that was evaluated.

    Args:
        resume_from: step of the checkpoint that the run goes on from: records of later steps are removed, since those
            steps happen again. None starts the file anew.
    """

    def __init__(self, path: Path, resume_from: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [r for r in _read(path) if r["step"] <= resume_from] if resume_from is not None else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(partial, path)
        self._path = path
        self.rewards = {r["step"]: r.get("reward", -math.inf) for r in kept if r["kind"] == "evaluation"}

    def evaluated(self, step: int) -> bool:
        return step in self.rewards

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record with keys `step` and `kind` ("step" or "evaluation").

        Raises:
            TrainerError: a value is not finite, or the disk is full.
        """
        odd = {k: v for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
        if odd:
            raise TrainerError(f"step {record['step']}: not finite: {odd}")
        try:
            with self._path.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        except OSError as error:
            raise TrainerError(f"cannot write {self._path}: {error}") from error
        if record["kind"] == "evaluation":
            self.rewards[record["step"]] = record.get("reward", -math.inf)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break  # a line cut off by a kill is the last one
    return records
