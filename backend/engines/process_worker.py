"""The child of `ProcessEngine`: `python -m sparring.backend.engines.process_worker SOCKET_FD WEIGHTS_FD PARENT_PID`.

Lines of JSON go both ways over the socket. The first one in is the model's folder and its options, the first one out
says that it is ready, or why not.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

import torch
from transformers.utils import logging

from sparring.backend.engines.options import EngineOptions
from sparring.backend.engines.shared_weights import SharedWeights
from sparring.backend.engines.worker import Message, Worker, make_scheduler, read_weights
from sparring.errors import EngineError

__all__ = ["main"]

_PARENT_CHECK_S = 1.0


def main(socket_fd: int, weights_fd: int, parent_pid: int) -> None:
    with socket.socket(fileno=socket_fd) as connection:
        lines = _Lines(connection, parent_pid)
        setup = lines.read()
        os.nice(setup["niceness"])
        try:
            scheduler = make_scheduler(setup["model"], EngineOptions.from_json(setup["options"]))
        except EngineError as error:
            lines.write([{"event": "failed", "reason": str(error)}])
            return
        model = scheduler.model
        shared = SharedWeights(weights_fd, model.shapes, model.tied, model.dtype)

        def open_weights(source: Any) -> Any:
            return shared.read() if source is None else read_weights(source, model)

        worker = Worker(scheduler, lines.write, open_weights)
        lines.write(
            [{"event": "ready", "shapes": model.shapes, "tied": sorted(model.tied), "dtype": str(model.dtype)[6:]}]
        )
        threading.Thread(target=_listen, args=(lines, worker), daemon=True).start()
        worker.run()


def _listen(lines: _Lines, worker: Worker) -> None:
    """Pass commands on; answer at once what must not wait for a step; end the process with its parent."""
    while True:
        command = lines.read()
        if command["op"] == "status":
            lines.write([{"event": "reply", "id": command["id"], "value": worker.status()}])
        else:
            worker.inbox.put(command)


class _Lines:
    """JSON lines over a socket. A parent that is gone ends this process, whatever its other threads do."""

    def __init__(self, connection: socket.socket, parent_pid: int) -> None:
        self._connection, self._parent_pid = connection, parent_pid
        self._buffer = bytearray()
        self._writing = threading.Lock()

    def read(self) -> Message:
        while (end := self._buffer.find(b"\n")) < 0:
            # The socket closes with the parent, unless a fork of the parent holds it too: so look at the pid as well.
            readable, _, _ = select.select([self._connection], [], [], _PARENT_CHECK_S)
            if os.getppid() != self._parent_pid:
                os._exit(1)
            if readable:
                received = self._connection.recv(1 << 20)
                if not received:
                    os._exit(1)
                self._buffer += received
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message: Message = json.loads(line)
        return message

    def write(self, events: list[Message]) -> None:
        with self._writing:
            try:
                self._connection.sendall(json.dumps(events).encode() + b"\n")
            except OSError:
                os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: this one ends with its parent
    torch.set_grad_enabled(False)
    logging.disable_progress_bar()  # the standard error is for last words
    main(*map(int, sys.argv[1:]))
