"""`sparring serve inference`: the servers that a run of a configuration would start, kept for runs to attach to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.config import RunConfig
from sparring.errors import ConfigError, EngineError
from sparring.extras import missing

if TYPE_CHECKING:
    from sparring.backend.engines.remote.process import ServerProcess

__all__ = ["serve_inference"]

_WATCH_S = 1.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve_inference(config: RunConfig, *, host: str, port: int) -> int:
    """Serve until Ctrl-C or SIGTERM. With `engine.type=torch` the embedded engine speaks SGLang's endpoints.

    Args:
        port: of the first server, the others count up from it; 0 for free ones.

    Raises:
        ConfigError: no such model, nothing to run servers on, a package that is not installed, a port in use, or a
            configuration that attaches to servers itself.
        EngineError: a server did not start, or died.
    """
    from sparring.backend.listen import listen
    from sparring.backend.models import check_model, resolve_model
    from sparring.preflight import check_engine, check_packages
    from sparring.wiring import set_torch_environment

    if config.engine.urls:
        raise ConfigError("engine.urls names servers that run already; serve starts some: leave it out")
    if config.engine.type == "vllm" and not os.environ.get("SPARRING_ENGINE_KEY"):
        raise ConfigError(
            "vLLM's servers ask for a key: set SPARRING_ENGINE_KEY to a secret of yours, here and where runs attach"
        )
    if host not in _LOOPBACK:
        print(
            f"warning: whoever reaches the servers at {host} can change their weights, and may run code as you, since "
            "the endpoints for weights ask for no key: let none but machines that you trust reach them",
            file=sys.stderr,
        )
    for i in range(config.engine.servers):
        listen(host, port + i if port else 0).close()
    check_model(config.model.path)
    check_engine(config.engine)
    if config.engine.type == "torch":
        check_packages("sparring serve")
        if lack := missing(["aiohttp"], "sparring serve"):  # what speaks SGLang's endpoints is one package, both ends
            raise ConfigError(lack)
    set_torch_environment(config)
    from sparring.backend.compute_type import settle_dtypes

    config = settle_dtypes(config, lambda line: print(line, file=sys.stderr), of=["engine"])
    model = resolve_model(config.model.path)
    start, kind = (_torch, "sglang") if config.engine.type == "torch" else (_servers, config.engine.type)
    return asyncio.run(_until_signal(_keep(start(config, model, host, port), kind)))


async def _keep(serving: Any, kind: str) -> None:
    async with serving as (urls, watch):
        print(f"ready; a run attaches with:  engine.type={kind} 'engine.urls={json.dumps(urls)}'", flush=True)
        await watch()


@asynccontextmanager
async def _servers(config: RunConfig, model: Path, host: str, port: int) -> AsyncIterator[tuple[list[str], Any]]:
    from sparring.backend.engines.configured import make_servers

    logs = Path(tempfile.mkdtemp(prefix="sparring-serve-"))
    lora = config.trainer.lora if config.serves_adapter else None
    servers = make_servers(config, model, logs, host=host, port=port, lora=lora)
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.push_async_callback(server.stop)
        urls = await asyncio.gather(*(server.start() for server in servers))
        yield urls, lambda: _watch(servers)


async def _watch(servers: Sequence[ServerProcess[Any]]) -> None:
    while True:
        for server in servers:
            if words := await server.last_words(0.0):
                raise EngineError(words)
        await asyncio.sleep(_WATCH_S)


@asynccontextmanager
async def _torch(config: RunConfig, model: Path, host: str, port: int) -> AsyncIterator[tuple[list[str], Any]]:
    from sparring.backend.engines.fake_sglang import FakeSGLang
    from sparring.wiring import make_engine

    lora = config.trainer.lora if config.engine.lora == "adapter" else None  # a run that attaches may want either
    engine = make_engine(config, model, model, lora=lora)
    async with FakeSGLang(engine, model, seeds=config.engine.deterministic).serve(host, port) as url:
        yield [url], lambda: _watch_engine(engine)


async def _watch_engine(engine: Any) -> None:
    while True:
        await engine.health()  # raises what it died of
        await asyncio.sleep(_WATCH_S)


async def _until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Run `work`; a signal cancels it, whatever it does, and it ends what it started."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return 0
