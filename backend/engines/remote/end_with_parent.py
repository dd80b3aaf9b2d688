"""Runs a module as a program that ends with the process that started it: `python -P end_with_parent.py MODULE ...`.

It runs in the server's own Python and imports nothing of sparring. Its standard input is a pipe from the parent; when
that closes, the whole process group is killed, so that no server is left holding the GPU after a crash.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)
