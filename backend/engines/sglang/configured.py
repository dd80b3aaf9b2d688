"""The SGLang engine, or the servers alone, that a run's configuration asks for."""

from __future__ import annotations

import sys
from pathlib import Path

from sparring.backend.engines.base import Engine
from sparring.backend.engines.sglang.engine import SGLangEngine
from sparring.backend.engines.sglang.pool import EnginePool
from sparring.backend.engines.sglang.server import ServerOptions, SGLangServer
from sparring.config import RunConfig

__all__ = ["make_servers", "make_sglang"]


def make_sglang(config: RunConfig, model: Path, logs: Path) -> Engine:
    """Servers that run already (`engine.urls`), or `engine.servers` of our own; several are one pool.

    Args:
        logs: folder for the servers' logs, `sglang-0.log` and so on.
    """
    knobs, max_length = config.engine, config.model.max_length
    if knobs.urls:
        engines = [SGLangEngine(model, url=url, max_length=max_length, live=False) for url in knobs.urls]
    else:
        engines = [
            SGLangEngine(model, server=server, max_length=max_length, live=False)
            for server in make_servers(config, model, logs)
        ]
    return engines[0] if len(engines) == 1 else EnginePool(engines)


def make_servers(
    config: RunConfig, model: Path, logs: Path, *, host: str = "127.0.0.1", port: int = 0
) -> list[SGLangServer]:
    """`engine.servers` of them, not started.

    Args:
        port: of the first, the others count up from it; 0 for free ones.
    """
    knobs = config.engine
    return [
        SGLangServer(
            model,
            ServerOptions(
                python=knobs.python or sys.executable,
                host=host,
                port=port + i if port else 0,
                memory_fraction=knobs.memory_fraction,
                max_running=-(-knobs.slots // knobs.servers),
                dtype=knobs.dtype,
                deterministic=knobs.deterministic,
                extra=tuple(knobs.arguments),
                environment=knobs.environment,
            ),
            max_length=config.model.max_length,
            log_path=logs / f"sglang-{i}.log",
        )
        for i in range(knobs.servers)
    ]
