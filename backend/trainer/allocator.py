"""Keep what a step frees for the next step."""

from __future__ import annotations

import ctypes

__all__ = ["LARGE_ROW", "keep_freed_memory"]

LARGE_ROW = 8192  # tokens: shorter rows of small models have hardly a tensor above 32 MiB
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def keep_freed_memory() -> bool:
    """Let the C library hand out large blocks from its heap and never shrink it; False where it has no such setting.

    Otherwise glibc maps every block above 32 MiB anew, and the system zeroes it: on a CPU a row of 27,000 tokens spends
    a third of its time there. The process then stays as large as its largest step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))
