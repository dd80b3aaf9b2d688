"""Measure on one GPU, by parts; a part that a results file has is skipped.

A part takes less than 8 minutes, or is made of legs that do: what a leg has trained is kept, so that the same command,
ended after any of them, goes on from there.

    python -m benchmarks.gpu --json benchmarks/results/h200-DATE.json            # all that is missing
    python -m benchmarks.gpu --json FILE --part raw --part weights --again       # these, anew
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._report import Row, report
from benchmarks.gpu.gsm8k import Unfinished
from sparring.interrupt import interruptible

PARTS = ("raw", "gateway", "weights", "numerics", "sharing", "trainer", "trl_step", "tree", "gsm8k", "gsm8k_sync",
         "calculator", "long_tailed")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", dest="json_path", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--again", action="store_true", help="measure parts anew that the file has")
    arguments = parser.parse_args()
    faulthandler.enable()  # a part that a signal ends says where it was
    path: Path = arguments.json_path
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    status = 0
    for name in arguments.part or PARTS:
        if name in results["parts"] and not arguments.again:
            print(f"{name}: measured at {results['parts'][name]['at']}")
            continue
        began = time.monotonic()
        logs = path.parent / f"logs-{name}"
        logs.mkdir(exist_ok=True)
        try:
            with interruptible():
                rows, details = _measured(name, logs)
        except KeyboardInterrupt:
            print(f"{name}: stopped; the same command goes on from here")
            return 130
        except Exception:
            traceback.print_exc()
            status = 1
            continue
        seconds = time.monotonic() - began
        status |= report(f"{name}, {seconds:.0f} s", rows)
        results["parts"][name] = _record(rows, details, seconds)
        path.write_text(json.dumps(results, indent=1) + "\n")
    return status


def _measured(name: str, logs: Path) -> tuple[list[Row], dict[str, Any]]:
    """One leg after the other."""
    while True:
        try:
            found: tuple[list[Row], dict[str, Any]] = importlib.import_module(f"benchmarks.gpu.{name}").measure(logs)
            return found
        except Unfinished as reached:
            print(f"{name}: {reached}; on with the next leg", flush=True)


def _record(rows: list[Row], details: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "gpu": _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "command": " ".join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "seconds": round(seconds, 1),
        "rows": [vars(row) for row in rows],
        "details": details,
    }


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
