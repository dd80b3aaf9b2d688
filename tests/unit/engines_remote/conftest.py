from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from sparring.backend.engines.fake_server import FakeServer
from sparring.backend.engines.fake_sglang import FakeSGLang
from sparring.backend.engines.fake_vllm import FakeVLLM
from sparring.backend.engines.remote.engine import RemoteEngine
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.engines.sglang import SGLangEngine
from sparring.backend.engines.vllm import VLLMEngine

Ends = tuple[RemoteEngine, ScriptedEngine, FakeServer]


class Kind(NamedTuple):
    """A kind of server. `salt` is what its requests call the salt of the prefix cache."""

    engine: type[RemoteEngine]
    fake: type[FakeServer]
    salt: str


KINDS = {
    "sglang": Kind(SGLangEngine, FakeSGLang, "extra_key"),
    "vllm": Kind(VLLMEngine, FakeVLLM, "cache_salt"),
}


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def scripted(kind: Kind, tiny_qwen3: Path) -> Callable[..., AbstractAsyncContextManager[Ends]]:
    @asynccontextmanager
    async def make(script, *, max_length=1000, latency_s=0.0, **server):
        """An engine over a real HTTP server whose tokens are scripted; gives it and what is behind it."""
        inner = ScriptedEngine(script, latency_s=latency_s)
        fake = kind.fake(inner, tiny_qwen3, **server)
        async with fake.serve() as url:
            engine = kind.engine(tiny_qwen3, url=url, max_length=max_length)
            await engine.start()
            inner.log.clear()
            fake.bodies.clear()
            try:
                yield engine, inner, fake
            finally:
                await engine.stop()

    return make
