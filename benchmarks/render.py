"""Writes docs/results.md from the baselines in benchmarks/results: no figure in it comes from anywhere else.

    python -m benchmarks.render
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_HEAD = """# Measured
Written by `python -m benchmarks.render` from the files in `benchmarks/results`, each of which the named command wrote
on the named day. Ratios are of two programs side by side in one run; absolute times are those of the machine named.
"""


def main() -> int:
    sections = [_section(path) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))]
    (ROOT / "docs" / "results.md").write_text("\n".join([_HEAD, *filter(None, sections)]))
    return 0


def _section(path: Path) -> str:
    """One baseline as a table; empty for files of another form."""
    document = json.loads(path.read_text())
    if "rows" not in document:
        return ""
    machine = document["machine"]
    command = document.get("command", f"python -m benchmarks.{path.stem}")
    lines = [
        f"## {document['title']}",
        f"`{command}`, {document['at'][:10]}, {machine['cpus']} CPUs, {machine['platform']}",
        "",
    ]
    runs = document.get("details", {}).get("runs")
    if isinstance(runs, dict):
        return "\n".join([*lines, *_objectives(runs)]) + "\n"
    lines += [
        "| figure | measured | bound | percent |",
        "| --- | --- | --- | --- |",
        *map(_row, document["rows"]),
    ]
    if runs:
        lines += ["", *_runs(runs)]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> str:
    bound, percent = "", ""
    if row["bound"]:
        bound = f"{'at most' if row['at_most'] else 'at least'} {row['bound']:,.4g} {row['unit']}"
        percent = f"{row['measured'] / row['bound']:.0%}"
    return f"| {row['name']} | {row['measured']:,.4g} {row['unit']} | {bound} | {percent} |"


def _runs(runs: list[dict[str, Any]]) -> list[str]:
    def share(evaluation: dict[str, Any]) -> str:
        return f"{evaluation['success']:.1%} ({evaluation['low']:.1%} to {evaluation['high']:.1%})"

    return [
        "| seed | held-out before | held-out after | training, s | peak memory, GiB | version lag |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {r['seed']} | {share(r['before'])} | {share(r['after'])} | {r['train_s']:.0f} | {r['peak_gib']:.2f} "
            f"| {r['max_lag']} |"
            for r in runs
        ),
    ]


def _objectives(runs: dict[str, list[dict[str, float]]]) -> list[str]:
    """A line for each objective; its interval is Student's, over seeds."""
    from benchmarks.objectives import interval

    lines = ["| objective | reward at first | in the last quarter | 95% over seeds | training step, s |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, results in runs.items():
        before, after = (statistics.mean(r[key] for r in results) for key in ("before", "reward"))
        step = statistics.median(r["step_s"] for r in results)
        half = interval([r["reward"] for r in results])
        lines.append(f"| {name} | {before:.3f} | {after:.3f} | ± {half:.3f} | {step:.2f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
