"""How an SGLang server is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.process import ProcessOptions, ServerProcess
from sparring.backend.engines.sglang.adapter import served_modules
from sparring.config import LoraConfig

__all__ = ["SGLangServer", "ServerOptions"]

_LAUNCHER = Path(__file__).with_name("launcher.py")
_PREFILL_DELAY_MS = 300


@dataclass(frozen=True)
class ServerOptions(ProcessOptions):
    """As for any server, and what is SGLang's own.

    Attributes:
        max_running: CUDA graphs are captured up to it, since a larger batch would run kernel by kernel, bound by the
            CPU.
        delay_prefill: prompts wait until there are so many of them, as a share of the running requests, or for 300 ms.
            Requests end one at a time, and a forward pass for each new prompt alone would halve the throughput.
        fp32_head: logits in float32, closer to a trainer that computes them so.
        attention: triton is in every build; fa3 is faster where the build has it.
        memory_saver: its memory can be given back and taken again; SGLang needs the package torch_memory_saver for it.
        lora: it can compute adapters like this beside the model.
    """

    fp32_head: bool = False
    delay_prefill: float = 0.1
    attention: str = "triton"
    memory_saver: bool = False
    lora: LoraConfig | None = None


class SGLangServer(ServerProcess[ServerOptions]):
    kind = "SGLang"
    package = "sglang"

    def _program(self) -> Sequence[str]:
        return self._options.python, "-P", str(_LAUNCHER)

    def _environment(self) -> dict[str, str]:
        return {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}

    def _arguments(self, port: int) -> list[str]:
        options = self._options
        arguments = {
            "--model-path": self._model_path,
            "--host": options.host,
            "--port": port,
            "--base-gpu-id": options.gpu,
            "--dtype": options.dtype,
            "--context-length": self._max_length + 8,  # the server keeps a few positions for itself
            "--mem-fraction-static": options.memory_fraction,
            "--max-running-requests": options.max_running,
            "--cuda-graph-max-bs": options.max_running,
            "--max-total-tokens": options.max_running * self._max_length,  # all of it that requests can ever fill
            "--attention-backend": options.attention,
            "--sampling-backend": "pytorch",  # with a seed, and with the log-probabilities of a cut distribution
            "--grammar-backend": "none",
            "--log-level": "warning",  # a line for every prefill costs the scheduler's time
        }
        flags = ["--sleep-on-idle"]
        if options.delay_prefill:
            flags += ["--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", str(options.delay_prefill)]
            flags += ["--prefill-delayer-max-delay-ms", str(_PREFILL_DELAY_MS)]
        if options.deterministic:
            flags.append("--enable-deterministic-inference")
        if options.fp32_head:
            flags.append("--enable-fp32-lm-head")
        if options.memory_saver:
            flags.append("--enable-memory-saver")
        if options.lora is not None:
            modules = served_modules(WeightLayout.of_model(self._model_path), options.lora)
            flags += ["--enable-lora", "--max-lora-rank", str(options.lora.rank), "--max-loras-per-batch", "2"]
            flags += ["--lora-target-modules", *modules]
        return [*(str(part) for pair in arguments.items() for part in pair), *flags, *options.extra]
