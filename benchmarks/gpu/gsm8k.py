"""GSM8K with a 0.5B model on one GPU, asynchronously: accuracy on all test problems, before and after.

The run is `sparring train examples/gsm8k_h200.yaml`; what is reported comes from its own metrics.

    python -m benchmarks.gpu.gsm8k RESULTS.json gsm8k 2-12 16-24      # a part's rows, and what these steps did
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._report import Row
from benchmarks._report import report as print_rows
from benchmarks.gpu._servers import kept_urls

CONFIG = "examples/gsm8k_h200.yaml"
LEG_S = float(os.environ.get("SPARRING_BENCH_GSM8K_S", 440))  # of a run: servers that start, steps, evaluations
_PHASES = ("time/wait_s", "time/train_s", "time/publish_s", "time/record_s")
_END_S = 90.0  # it saves a checkpoint first
AIMS_S = {0.37: 150.0, 0.40: 420.0}


class Unfinished(Exception):
    """A part has more to do, and goes on where it is when it is measured again."""


def measure(out: Path, staleness: int = 2) -> tuple[list[Row], dict[str, Any]]:
    """
    Raises:
        Unfinished: the leg is over and the run is not; the next call resumes it.
    """
    overrides = [f"model.path={os.environ['SPARRING_BENCH_MODEL']}", f"rollout.staleness={staleness}"]
    overrides += [*engine_overrides(), *os.environ.get("SPARRING_BENCH_GSM8K", "").split()]
    folder = out / f"eta{staleness}"
    found = summarise(run_command(CONFIG, folder, overrides, timeout_s=LEG_S, resume=True))
    if not (folder / "summary.json").exists():
        raise Unfinished(f"{found['steps'][-1]['step']:.0f} steps are done")
    found["overrides"] = overrides[1:]
    return report(found, f"η = {staleness}"), found


def report(found: dict[str, Any], name: str) -> list[Row]:
    """Rows from one summary. Between two evaluations the curve is taken as straight."""
    evaluations = found["evaluations"]
    first, last = evaluations[0], evaluations[-1]
    best = max(evaluations, key=lambda e: e["success"])
    rows = [
        Row(f"{name}: accuracy before, {first['episodes']:.0f} problems", first["success"] * 100, "%"),
        Row(f"{name}: accuracy after {last['step']} steps", last["success"] * 100, "%"),
        Row(f"{name}: seconds of steps until then", last["steps_s"], "s"),
        Row(f"{name}: most, after {best['step']} steps ({best['steps_s']:.0f} s of them)", best["success"] * 100, "%"),
        Row(f"{name}: trajectories", found["episodes_per_s"], "/s"),
        Row(f"{name}: sampled tokens", found["sampled_tokens_per_s"], "/s"),
        Row(f"{name}: trainer busy", found["trainer_busy"] * 100, "%"),
        Row(f"{name}: sampler busy", found["sampler_busy"] * 100, "%"),
        Row(f"{name}: a step", found["step_s"], "s"),
    ]
    for aim, bound in AIMS_S.items():
        reached, clock = (seconds_to(evaluations, aim, clock) for clock in ("steps_s", "wall_s"))
        if reached is None or clock is None:
            missed = f"{name}: most accuracy, where {aim:.0%} were to come in {bound:.0f} s"
            rows.append(Row(missed, best["success"] * 100, "%", aim * 100))
        else:
            rows.append(Row(f"{name}: seconds of steps to {aim:.0%}", reached, "s", bound, at_most=True))
            rows.append(Row(f"{name}: seconds to {aim:.0%}, evaluations counted", clock, "s"))
    return rows


def engine_overrides() -> list[str]:
    """Where a run samples: the servers that `benchmarks.gpu.serve` keeps, else ones that it starts itself."""
    kept = kept_urls()
    if "default" in kept:
        urls = [kept[name] for name in ("default", "second", "third") if name in kept]
        return [f"engine.urls={json.dumps(urls)}"]
    if python := os.environ.get("SPARRING_SGLANG_PYTHON"):
        path = {"PYTHONPATH": os.environ.get("SPARRING_SGLANG_PATH", "")}
        return [f"engine.python={python}", f"engine.environment={json.dumps(path)}"]
    return []


def run_command(
    config: str,
    folder: Path,
    overrides: Sequence[str],
    *,
    timeout_s: float = 800.0,
    seconds_of_steps: float | None = None,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """One training run in a process of its own, ended gently when its time is over; what its metrics say.

    Args:
        seconds_of_steps: end it once its steps have taken so long, evaluations aside.
        resume: go on with the run in `folder`, if there is one that has not ended; else it begins there anew.

    Raises:
        RuntimeError: it died: a curve that breaks off must not look like one that was ended.
    """
    command = [sys.executable, "-m", "sparring.cli", "train", config, f"run_dir={folder}", *overrides]
    if resume and (folder / "config.yaml").exists() and not (folder / "summary.json").exists():
        command.append("--resume")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    with open(f"{folder}.log", "a" if resume else "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if seconds_of_steps is not None and _stepped_s(metrics) >= seconds_of_steps:
                    break
                time.sleep(1.0)
            died = process.poll() not in (None, 0)
        finally:
            _end(process)
    said = Path(f"{folder}.log").read_text()[-3000:]
    print(said, flush=True)
    if died:
        raise RuntimeError(f"the run in {folder} died with status {process.returncode}: {said[-500:]}")
    return _records(metrics)


def summarise(records: list[dict[str, Any]], *, skip: int = 0) -> dict[str, Any]:
    """The curve over seconds of steps, evaluations aside, and the means of what each side did.

    `wall_s` counts the evaluations before a point too, but for the first: what is sampled while one runs is trained
    after it.

    Args:
        skip: steps at the beginning that rates and means leave out.
    """
    seconds = evaluating = 0.0
    steps: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "evaluation":
            evaluations.append({**record, "steps_s": round(seconds, 2), "wall_s": round(seconds + evaluating, 2)})
            evaluating += record.get("time/evaluate_s", 0.0) if steps else 0.0
        else:
            seconds += record["time/step_s"]
            steps.append({**record, "steps_s": round(seconds, 2), "wall_s": round(seconds + evaluating, 2)})
    return {"evaluations": evaluations, "steps": steps, "seconds": seconds, **rates(steps[skip:])}


def rates(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What both sides did in these steps, a second or in the mean.

    Raises:
        RuntimeError: there are none.
    """
    if not steps:
        raise RuntimeError("the run made no step that counts; its log says why")
    counted_s = sum(step["time/step_s"] for step in steps)

    def mean(key: str) -> float:
        return float(sum(step.get(key, 0.0) for step in steps) / len(steps))

    return {
        "episodes_per_s": sum(step["episodes"] for step in steps) / counted_s,
        "sampled_tokens_per_s": sum(step["sampler/tokens"] for step in steps) / counted_s,
        "trainer_busy": mean("trainer/busy"),
        "sampler_busy": mean("sampler/busy"),
        "step_s": mean("time/step_s"),
    }


def seconds_to(evaluations: Sequence[dict[str, Any]], accuracy: float, clock: str = "steps_s") -> float | None:
    """When the curve through the evaluations first reaches `accuracy`; None where it never does."""
    for before, after in pairwise(evaluations):
        if before["success"] < accuracy <= after["success"]:
            share = (accuracy - before["success"]) / (after["success"] - before["success"])
            return float(before[clock] + share * (after[clock] - before[clock]))
    return 0.0 if evaluations and evaluations[0]["success"] >= accuracy else None


def _records(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        raise RuntimeError(f"the run left no {metrics.name}; its log says why")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _stepped_s(metrics: Path) -> float:
    if not metrics.exists():
        return 0.0
    whole = metrics.read_text().rpartition("\n")[0]
    return sum(json.loads(line).get("time/step_s", 0.0) for line in whole.splitlines())


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _spread(window: str, phase: str, steps: Sequence[dict[str, Any]]) -> list[Row]:
    """How long a phase took in most steps, and in the longest; none in runs that did not measure it."""
    took = sorted(step[phase] for step in steps if phase in step)
    if len(took) < 2:
        return []
    low, middle, high = statistics.quantiles(took, n=4)
    named = {"a quarter of the steps at most": low, "half": middle, "three quarters": high, "the longest": took[-1]}
    return [Row(f"steps {window}: {phase}, {name}", value, "s") for name, value in named.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("part")
    parser.add_argument("windows", nargs="*", metavar="FIRST-LAST", help="steps whose rates to print")
    arguments = parser.parse_args()
    found = json.loads(arguments.results.read_text())["parts"][arguments.part]["details"]
    rows = report(found, arguments.part)
    for window in arguments.windows:
        first, last = map(int, window.split("-"))
        steps = [step for step in found["steps"] if first <= step["step"] <= last]
        rows += [Row(f"steps {window}: {name}", value, "") for name, value in rates(steps).items()]
        rows += [row for phase in _PHASES for row in _spread(window, phase, steps)]
    return print_rows(arguments.part, rows)


if __name__ == "__main__":
    sys.exit(main())
