from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sparring.backend.engines.fake_sglang import FakeSGLang
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.engines.sglang import SGLangEngine


@asynccontextmanager
async def scripted(model: Path, script, *, reports_versions=True, seeds=True, max_length=1000, latency_s=0.0, **engine):
    """A `SGLangEngine` over a real HTTP server whose tokens are scripted; gives both ends."""
    inner = ScriptedEngine(script, latency_s=latency_s, **engine)
    fake = FakeSGLang(inner, model, reports_versions=reports_versions, seeds=seeds)
    async with fake.serve() as url:
        engine = SGLangEngine(model, url=url, max_length=max_length)
        await engine.start()
        inner.log.clear()
        fake.bodies.clear()
        try:
            yield engine, inner, fake
        finally:
            await engine.stop()


@pytest.fixture
def scripted_sglang(tiny_qwen3: Path):
    def make(script, **options) -> AsyncIterator[tuple[SGLangEngine, ScriptedEngine, FakeSGLang]]:
        return scripted(tiny_qwen3, script, **options)

    return make
