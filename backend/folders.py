"""Folders that are whole or absent, whatever ends the process that writes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["written_aside"]


@contextmanager
def written_aside(final: Path) -> Iterator[Path]:
    """A hidden folder beside `final` to write into. Once the block ends well it is flushed to disk and takes the place
    of `final`; when it ends in an exception, it is removed, and what stood there stands.

    For one writer at a time.
    """
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _flush(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
