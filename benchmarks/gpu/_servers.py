"""SGLang servers and models for the benchmarks.

`SPARRING_SGLANG_PYTHON` is the Python of SGLang's environment, `SPARRING_SGLANG_PATH` its PYTHONPATH if it needs one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from sparring.backend.engines.sglang import ServerOptions, SGLangEngine, SGLangServer
from sparring.backend.models import cache_dir

MAX_LENGTH = 1024
_VOCABULARY = 151936
# Name: class of the configuration; hidden, intermediate, layers, heads, key-value heads, head dimension.
SHAPES = {
    "qwen2.5-0.5b": ("Qwen2Config", 896, 4864, 24, 14, 2, None),
    "qwen3-0.6b": ("Qwen3Config", 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": ("Qwen3Config", 2048, 6144, 28, 16, 8, 128),
    "tiny": ("Qwen3Config", 256, 512, 2, 4, 2, 64),
}


def config_of(shape: str) -> Any:
    import transformers

    kind, hidden, intermediate, layers, heads, kv_heads, head_dim = SHAPES[shape]
    return getattr(transformers, kind)(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        **({"head_dim": head_dim} if head_dim else {}),
    )


def random_model(shape: str, folder: Path | None = None) -> Path:
    """A folder with random weights in the shape of a model, made once; without a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = folder or cache_dir() / f"random-{shape}"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
        model.cpu().save_pretrained(folder)
    return folder


def options(*extra: str, environment: dict[str, str] | None = None, **fields: Any) -> ServerOptions:
    path = {"PYTHONPATH": os.environ.get("SPARRING_SGLANG_PATH", "")}
    return ServerOptions(
        python=os.environ.get("SPARRING_SGLANG_PYTHON", sys.executable),
        extra=extra,
        environment=path | (environment or {}),
        **{"memory_fraction": 0.5, **fields},
    )


@asynccontextmanager
async def running(
    model: Path, *servers: ServerOptions, logs: Path, command: tuple[str, ...] | None = None
) -> AsyncIterator[list[str]]:
    """The URLs of servers that start side by side; one that does not start leaves an error in place of its URL."""
    async with AsyncExitStack() as stack:
        processes = [
            SGLangServer(model, each, max_length=MAX_LENGTH, log_path=logs / f"server-{i}.log", command=command)
            for i, each in enumerate(servers)
        ]
        for process in processes:
            stack.push_async_callback(process.stop)
        started = await asyncio.gather(*(process.start() for process in processes), return_exceptions=True)
        yield [url if isinstance(url, str) else f"error: {url}" for url in started]


@asynccontextmanager
async def attached(model: Path, url: str) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(model, url=url, max_length=MAX_LENGTH)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
