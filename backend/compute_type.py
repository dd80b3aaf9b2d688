"""What a run computes in, where its configuration leaves that to the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch

from sparring.config import EngineConfig, RunConfig, TrainerConfig

__all__ = ["computes_on_cpu", "settle_dtypes"]

_SIDE, _PRODUCTS = 192, 4
_MOST_SLOWDOWN = 2.0


def settle_dtypes(
    config: RunConfig, tell: Callable[[str], None] = lambda line: None, *, of: Sequence[str] = ("engine", "trainer")
) -> RunConfig:
    """`config` with a type wherever it says `auto`: bfloat16, but float32 on a processor that is slow in bfloat16.

    Args:
        tell: called with a line where that is float32.
        of: the sections that the caller computes by; another keeps what it says.
    """
    every: dict[str, EngineConfig | TrainerConfig] = {"engine": config.engine, "trainer": config.trainer}
    sections = {name: every[name] for name in of}
    on_cpu = {
        "engine": config.engine.type == "torch" and computes_on_cpu(config.engine.device),
        "trainer": computes_on_cpu(config.trainer.device),
    }
    auto = [name for name, section in sections.items() if section.dtype == "auto"]
    slow = [name for name in auto if on_cpu[name] and bfloat16_slowdown() > _MOST_SLOWDOWN]
    if slow:
        which = "computing in" if len(slow) == len(every) else f"{slow[0]}.dtype:"
        tell(f"{which} float32, as this processor is slow in bfloat16 ({bfloat16_slowdown():.0f} times the time)")
    settled = {
        name: sections[name].model_copy(update={"dtype": "float32" if name in slow else "bfloat16"}) for name in auto
    }
    return config.model_copy(update=settled)


def computes_on_cpu(device: str) -> bool:
    """What `trainer.device` or `engine.device` means on this machine."""
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


@cache
def bfloat16_slowdown() -> float:
    """How many times longer a product takes in bfloat16 than in float32 on one thread, measured in some 50 ms.

    The processor's flags would not do: what counts is whether PyTorch has kernels for them. A Xeon with amx_bf16 gave
    0.3, the same one held to plain AVX-512 4, and held to AVX2 47; an EPYC with AVX2 alone gave 27.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        least = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
        for _ in range(_PRODUCTS):  # in turns, so that other work on the machine meets both; the first loads kernels
            for dtype in least:
                a = torch.ones(_SIDE, _SIDE, dtype=dtype)
                began = time.perf_counter()
                torch.mm(a, a)
                least[dtype] = min(least[dtype], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return least[torch.bfloat16] / least[torch.float32]
