"""How every benchmark reports: measured, bound, percent, on the screen and, with --json FILE, in a baseline."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "report"]


@dataclass(frozen=True)
class Row:
    """One figure. `bound`: at least so much, or at most where `at_most`; None where it is printed alone."""

    name: str
    measured: float
    unit: str
    bound: float | None = None
    at_most: bool = False

    @property
    def holds(self) -> bool:
        if self.bound is None:
            return True
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


def report(
    title: str, rows: Sequence[Row], json_path: str | Path | None = None, details: Mapping[str, Any] | None = None
) -> int:
    """Print the table, write the JSON where asked, and return the exit status: 0 where every bound holds."""
    table = Table("figure", "measured", "bound", "percent", "", title=title, box=None, title_justify="left")
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in rows:
        bound = "" if row.bound is None else f"{'≤' if row.at_most else '≥'} {row.bound:,.4g} {row.unit}"
        percent = f"{row.measured / row.bound:.0%}" if row.bound else ""
        verdict = "" if row.bound is None else "ok" if row.holds else "MISSED"
        table.add_row(row.name, f"{row.measured:,.4g} {row.unit}", bound, percent, verdict)
    Console(width=120).print(table)
    if json_path is not None:
        document = {
            "title": title,
            "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {
                "cpus": os.cpu_count(),
                "platform": f"{platform.system()} {platform.machine()}",
                "python": platform.python_version(),
            },
            "rows": [asdict(row) for row in rows],
            "details": dict(details or {}),
        }
        Path(json_path).write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row.holds for row in rows) else 1
