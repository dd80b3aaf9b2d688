"""The engine on servers, or the servers alone, that a run's configuration asks for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from sparring.backend.engines.base import Engine
from sparring.backend.engines.remote.engine import RemoteEngine
from sparring.backend.engines.remote.pool import EnginePool
from sparring.backend.engines.remote.process import ProcessOptions, ServerProcess
from sparring.backend.engines.remote.transport import ENGINE_KEY
from sparring.config import LoraConfig, RunConfig

__all__ = ["make_remote", "make_servers"]


def make_remote(config: RunConfig, model: Path, logs: Path, *, lora: LoraConfig | None = None) -> Engine:
    """Servers that run already (`engine.urls`), or `engine.servers` of our own; several are one pool.

    Args:
        logs: folder for the servers' logs, `sglang-0.log` and so on.
        lora: new weights are the tensors of such an adapter.
    """
    make, _, _ = _kind(config)
    common: dict[str, Any] = {"max_length": config.model.max_length, "live": False, **_weights(config, lora)}
    if config.engine.urls:
        key = os.environ.get(ENGINE_KEY)
        engines = [make(model, url=url, key=key, **common) for url in config.engine.urls]
    else:
        servers = make_servers(config, model, logs, lora=lora)
        engines = [make(model, server=server, **common) for server in servers]
    return engines[0] if len(engines) == 1 else EnginePool(engines)


def make_servers(
    config: RunConfig,
    model: Path,
    logs: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    lora: LoraConfig | None = None,
) -> list[ServerProcess[Any]]:
    """`engine.servers` of them, not started.

    Args:
        port: of the first, the others count up from it; 0 for free ones.
        lora: they must be able to compute such an adapter.
    """
    knobs = config.engine
    _, make, options = _kind(config)
    own: dict[str, Any] = {}
    if knobs.type == "sglang":
        own = {"memory_saver": knobs.release_memory, "lora": lora}
    return [
        make(
            model,
            options(
                python=knobs.python or sys.executable,
                host=host,
                port=port + i if port else 0,
                memory_fraction=knobs.memory_fraction,
                max_running=-(-knobs.slots // knobs.servers),
                dtype=knobs.dtype,
                deterministic=knobs.deterministic,
                extra=tuple(knobs.arguments),
                environment=knobs.environment,
                **own,
            ),
            max_length=config.model.max_length,
            log_path=logs / f"{knobs.type}-{i}.log",
        )
        for i in range(knobs.servers)
    ]


def _weights(config: RunConfig, lora: LoraConfig | None) -> dict[str, Any]:
    """What an engine is told of how it gets new weights."""
    knobs = config.engine
    if knobs.type != "sglang":
        return {}
    from sparring.backend.engines.sglang.options import WeightOptions

    options = WeightOptions(
        route=None if knobs.weights == "auto" else knobs.weights,
        bucket_bytes=knobs.bucket_mib * 2**20,
        verify_every=knobs.verify_weights,
        host=knobs.group_host,
    )
    return {"weights": options, "lora": lora}


def _kind(config: RunConfig) -> tuple[type[RemoteEngine], type[ServerProcess[Any]], type[ProcessOptions]]:
    if config.engine.type == "vllm":
        from sparring.backend.engines.vllm import VLLMEngine, VLLMServer

        return VLLMEngine, VLLMServer, ProcessOptions
    from sparring.backend.engines.sglang import ServerOptions, SGLangEngine, SGLangServer

    return SGLangEngine, SGLangServer, ServerOptions
