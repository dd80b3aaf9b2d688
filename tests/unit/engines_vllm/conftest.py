from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from sparring.backend.engines.fake_vllm import FakeVLLM
from sparring.backend.engines.scripted import Script, ScriptedEngine
from sparring.backend.engines.vllm import VLLMEngine

Ends = tuple[VLLMEngine, ScriptedEngine, FakeVLLM]


@pytest.fixture
def scripted_vllm(tiny_qwen3: Path) -> Callable[..., AbstractAsyncContextManager[Ends]]:
    @asynccontextmanager
    async def make(
        script: Script, *, key: str | None = None, max_length: int = 1000, latency_s: float = 0.0, **server
    ) -> AsyncIterator[Ends]:
        """A `VLLMEngine` over a real HTTP server whose tokens are scripted; gives both ends."""
        inner = ScriptedEngine(script, latency_s=latency_s)
        fake = FakeVLLM(inner, tiny_qwen3, key=key, **server)
        async with fake.serve() as url:
            engine = VLLMEngine(tiny_qwen3, url=url, key=key, max_length=max_length)
            await engine.start()
            inner.log.clear()
            fake.bodies.clear()
            try:
                yield engine, inner, fake
            finally:
                await engine.stop()

    return make
