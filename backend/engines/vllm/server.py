"""How a vLLM server is started."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from sparring.backend.engines.remote import process
from sparring.backend.engines.remote.process import ProcessOptions, ServerProcess
from sparring.backend.engines.remote.transport import ENGINE_KEY

__all__ = ["VLLMServer"]

_LAUNCHER = Path(process.__file__).with_name("end_with_parent.py")


class VLLMServer(ServerProcess[ProcessOptions]):
    """`vllm serve`, with what an engine of ours needs switched on.

    The key guards the endpoints that sample. Those that pause a server and change its weights exist in its development
    mode alone and ask for no key, and one of them unpickles what it is sent: whoever reaches the port can run code as
    the server's user. So it listens on loopback unless told otherwise, and belongs among users who trust each other.
    """

    kind = "vLLM"
    package = "vllm"

    def _make_key(self) -> str:
        return os.environ.get(ENGINE_KEY) or secrets.token_urlsafe(32)

    def _program(self) -> Sequence[str]:
        return self._options.python, "-P", str(_LAUNCHER), "vllm.entrypoints.cli.main"

    def _environment(self) -> dict[str, str]:
        variables = {
            "VLLM_API_KEY": str(self.key),  # an argument could be read in the list of processes
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self._options.deterministic:
            variables["VLLM_BATCH_INVARIANT"] = "1"
        return variables

    def _arguments(self, port: int) -> list[str]:
        options = self._options
        arguments = {
            "--host": options.host,
            "--port": port,
            "--dtype": options.dtype,
            "--max-model-len": self._max_length,
            "--gpu-memory-utilization": options.memory_fraction,
            "--max-num-seqs": options.max_running,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",  # the model's own has sampling defaults, which a request would inherit
            "--weight-transfer-config": '{"backend": "ipc"}',
            "--uvicorn-log-level": "warning",
        }
        flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]
        written = [str(part) for pair in arguments.items() for part in pair]
        return ["serve", str(self._model_path), *written, *flags, *options.extra]
