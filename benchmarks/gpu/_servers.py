"""SGLang servers and models for the benchmarks.

`SPARRING_SGLANG_PYTHON` is the Python of SGLang's environment, `SPARRING_SGLANG_PATH` its PYTHONPATH if it needs one,
`SPARRING_SGLANG_ARGUMENTS` further arguments for every server.
"""

from __future__ import annotations

import asyncio
import json
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


def options(*extra: str, **fields: Any) -> ServerOptions:
    return ServerOptions(
        python=os.environ.get("SPARRING_SGLANG_PYTHON", sys.executable),
        extra=(*extra, *os.environ.get("SPARRING_SGLANG_ARGUMENTS", "").split()),
        environment={"PYTHONPATH": os.environ.get("SPARRING_SGLANG_PATH", "")},
        **{"memory_fraction": 0.5, **fields},  # an upper bound: the cache's own size is what `max_running` needs
    )


# Random weights have no tokenizer; a cache of 131,072 tokens is 15 GB in these shapes.
_RANDOM = ("--skip-tokenizer-init", "--max-total-tokens", "131072")
VARIANTS = {
    "default": options(),
    "second": options(),
    "third": options(),
    "plain": options(),  # for `sharing`: started without MPS
    "each prompt at once": options(delay_prefill=0.0),
    "prompts with decoding": options("--enable-mixed-chunk", delay_prefill=0.0),
    "fp32 head": options(fp32_head=True),
    "deterministic": options(deterministic=True),
    **{shape: options(*_RANDOM, max_running=256) for shape in ("qwen3-0.6b", "qwen3-1.7b")},
}


@asynccontextmanager
async def running(model: Path, *names: str, logs: Path) -> AsyncIterator[dict[str, str]]:
    """URLs of `VARIANTS` by name: those that `benchmarks.gpu.serve` keeps running, else new ones, side by side.

    One that does not start has "error: ..." in place of its URL.
    """
    kept = kept_urls()
    async with AsyncExitStack() as stack:
        processes = {}
        for name in names:
            if name not in kept:
                log = logs / f"server-{name.replace(' ', '-')}.log"
                processes[name] = SGLangServer(model, VARIANTS[name], max_length=MAX_LENGTH, log_path=log)
                stack.push_async_callback(processes[name].stop)
        started = await asyncio.gather(*(each.start() for each in processes.values()), return_exceptions=True)
        new = {n: u if isinstance(u, str) else f"error: {u}" for n, u in zip(processes, started, strict=True)}
        yield {name: kept.get(name) or new[name] for name in names}


def kept_urls() -> dict[str, str]:
    """Name and URL of each server that the files in the folder SPARRING_BENCH_SERVERS name, if there is one."""
    folder = Path(os.environ.get("SPARRING_BENCH_SERVERS") or "/nowhere")
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.json")):
        found |= json.loads(file.read_text())
    return found


@asynccontextmanager
async def attached(model: Path, url: str) -> AsyncIterator[SGLangEngine]:
    """An engine on a server of `running`, which holds the weights of `model` from then on."""
    engine = SGLangEngine(model, url=url, max_length=MAX_LENGTH, live=False)
    await engine.start()
    try:
        await engine.publish(engine.version + 1, model)
        yield engine
    finally:
        await engine.stop()
