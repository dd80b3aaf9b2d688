"""GSM8K with a 0.5B model on one GPU, asynchronously: accuracy on all test problems, before and after.

The run is `sparring train examples/gsm8k_h200.yaml`; what is reported comes from its own metrics.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._report import Row
from benchmarks.gpu._servers import kept_urls

CONFIG = "examples/gsm8k_h200.yaml"
TIMEOUT_S = float(os.environ.get("SPARRING_BENCH_GSM8K_S", 440))


def measure(out: Path, staleness: int = 2) -> tuple[list[Row], dict[str, Any]]:
    found = run(out / f"eta{staleness}", staleness, os.environ.get("SPARRING_BENCH_GSM8K", "").split())
    first, last = found["evaluations"][0], found["evaluations"][-1]
    name = f"η = {staleness}"
    rows = [
        Row(f"{name}: accuracy before, {first['episodes']:.0f} problems", first["success"] * 100, "%"),
        Row(f"{name}: accuracy after {last['step']} steps", last["success"] * 100, "%", 37),
        Row(f"{name}: seconds of steps until then", last["steps_s"], "s"),
        Row(f"{name}: trajectories", found["episodes_per_s"], "/s"),
        Row(f"{name}: sampled tokens", found["sampled_tokens_per_s"], "/s"),
        Row(f"{name}: trainer busy", found["trainer_busy"] * 100, "%"),
    ]
    return rows, found


def run(folder: Path, staleness: int, overrides: list[str]) -> dict[str, Any]:
    """One training run in a process of its own, ended gently when its time is over."""
    command = [sys.executable, "-m", "sparring.cli", "train", CONFIG, f"run_dir={folder}"]
    command += [f"model.path={os.environ['SPARRING_BENCH_MODEL']}", f"rollout.staleness={staleness}", *overrides]
    kept = kept_urls()
    if "default" in kept:
        urls = [kept[name] for name in ("default", "second") if name in kept]
        command.append(f"engine.urls={json.dumps(urls)}")
    elif python := os.environ.get("SPARRING_SGLANG_PYTHON"):
        path = {"PYTHONPATH": os.environ.get("SPARRING_SGLANG_PATH", "")}
        command += [f"engine.python={python}", f"engine.environment={json.dumps(path)}"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    print(Path(f"{folder}.log").read_text()[-3000:], flush=True)
    return summarise([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The curve over seconds of steps, evaluations aside, and the means of what each side did."""
    seconds, steps, evaluations = 0.0, [], []
    for record in records:
        if record["kind"] == "evaluation":
            evaluations.append({**record, "steps_s": round(seconds, 2)})
        else:
            seconds += record["time/step_s"]
            steps.append({**record, "steps_s": round(seconds, 2)})
    if not steps:
        raise RuntimeError("the run made no step; its log says why")

    def mean(key: str) -> float:
        return sum(step.get(key, 0.0) for step in steps) / len(steps)

    return {
        "evaluations": evaluations,
        "steps": steps,
        "seconds": seconds,
        "episodes_per_s": sum(step["episodes"] for step in steps) / seconds,
        "sampled_tokens_per_s": sum(step["sampler/tokens"] for step in steps) / seconds,
        "trainer_busy": mean("trainer/busy"),
        "sampler_busy": mean("sampler/busy"),
        "step_s": mean("time/step_s"),
    }
