"""τ²-bench: our verdicts against those that upstream's evaluator gave, on every case of every task.

    python -m benchmarks.tau2_conformance [--split base] [--json FILE]

Upstream's are read from tests/golden/tau2, where scripts/make_tau2_golden.py wrote them.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks._report import Row, report
from sparring.envs.tau2 import Tau2Env
from sparring.envs.tau2.conformance import disagreements

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "tau2"
DOMAINS = ("airline", "retail", "telecom", "mock")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="full", help="full (telecom's 2,285 tasks; elsewhere all) or base")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for domain in DOMAINS:
        document = json.loads(gzip.decompress((GOLDEN / f"{domain}.json.gz").read_bytes()))
        env = Tau2Env(domain=domain)
        split = arguments.split if env.task_ids(arguments.split) else "base"
        compared, differ = asyncio.run(disagreements(env, split, document["verdicts"]))
        for task_id, case, ours, theirs in differ[:5]:
            print(f"{domain} {task_id}, {case}: ours {ours}, upstream's {theirs}")
        rows += [
            Row(f"{domain}: tasks", len(env.task_ids(split)), ""),
            Row(f"{domain}: verdicts that agree", compared - len(differ), "", compared),
            Row(f"{domain}: verdicts that differ", len(differ), "", 0, at_most=True),
        ]
        details[domain] = {"package": document["package"], "version": document["version"], "split": split}
    return report("τ²-bench, verdicts against upstream's", rows, arguments.json, details)


if __name__ == "__main__":
    raise SystemExit(main())
