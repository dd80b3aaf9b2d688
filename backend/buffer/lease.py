"""One writer a run: a lock that the kernel drops with the process that holds it, however that process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sparring.errors import BufferStateError

__all__ = ["RunLease"]

_held: set[int] = set()


def _let_go() -> None:
    """A forked child shares the lock, and would hold it for as long as it outlives us."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


class RunLease:
    """Holds `path` exclusively until `release`, or until this process is gone.

    Raises:
        BufferStateError: another process, or another buffer of this process, holds it; or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Programs that we start do not inherit it: Python's descriptors close on exec.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BufferStateError(f"{path} cannot be written: {error}; check run_dir and its permissions") from error
        _held.add(self._descriptor)
        try:
            self._lock()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Idempotent. The file stays: removing it would let two processes lock two files of one name."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise BufferStateError(
                f"the run in {self._path.parent} is in use by process {holder}: wait for it or stop it, "
                "or give this run another run_dir"
            ) from error
        except OSError as error:
            raise BufferStateError(f"{self._path} cannot be locked: {error}; is run_dir on a network mount?") from error
        try:
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())
        except OSError:
            pass  # a full disk: the lock holds all the same, and names nobody
