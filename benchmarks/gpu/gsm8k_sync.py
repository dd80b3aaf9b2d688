"""The same run as `gsm8k`, synchronously: sample, then train (η = 0). `compare` puts the two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._report import Row
from benchmarks.gpu import gsm8k


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    return gsm8k.measure(out, staleness=0)
