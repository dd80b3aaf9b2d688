"""One writer a run: a lock that the kernel drops with the process that holds it, however that process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sparring.errors import BufferStateError

__all__ = ["RunLease"]


class RunLease:
    """Holds `path` exclusively until `release`, or until this process is gone.

    Raises:
        BufferStateError: another process, or another buffer of this process, holds it.
    """

    def __init__(self, path: Path) -> None:
        # Python's descriptors are not inherited by programs that we start, so a sandbox or an engine cannot outlive
        # us with the lock in its hands.
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise BufferStateError(
                f"the run in {path.parent} is in use by process {holder}: wait for it or stop it, "
                "or give this run another run_dir"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Idempotent. The file stays: removing it would let two processes lock two files of one name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
