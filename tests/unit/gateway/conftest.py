"""A chat model without weights: a byte-level tokenizer and ChatML, in a Hugging Face folder."""

import asyncio
import contextlib
import gc
import json
import os
import re
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.gateway.http import GatewayServer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


SAMPLING = SamplingParams(max_new_tokens=256, temperature=0.7)


def _write_model(folder: Path, template: str | None = CHATML, **config: object) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def write_model():
    return _write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="session")
def chat(model_folder: Path) -> ChatFormat:
    return ChatFormat.load(model_folder, tool_template="hermes")


@pytest.fixture
def ids(chat):
    """Token ids of a text, special tokens included."""
    return lambda text: chat._tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture
def open_recorder(chat, ids):
    """A recorder over an engine that says the given texts one after another."""

    @asynccontextmanager
    async def open_(*texts, sampling=SAMPLING, max_length=4096, aliases=None, **options):
        engine = ScriptedEngine([ids(text) for text in texts], decode=chat.decode, **options)
        await engine.start()
        recorder = Recorder(engine, chat, sampling, max_length=max_length, aliases=aliases)
        yield recorder
        await recorder.aclose()

    return open_


@pytest.fixture
def serve(open_recorder):
    """As `open_recorder`, served over HTTP: gives the server, the recorder, and a client without a key."""

    @asynccontextmanager
    async def serve_(*texts, capacity=None, limits=None, **options):
        async with open_recorder(*texts, **options) as recorder:
            server = GatewayServer(recorder, capacity=capacity, limits=limits)
            async with server, httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1")) as http:
                yield server, recorder, http

    return serve_


def _descriptors() -> Counter[str]:
    """What this process holds open, by name; numbers of sockets differ and do not count."""
    links = []
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(re.sub(r"\d+", "", os.readlink(f"/dev/fd/{number}")))
    return Counter(links)


@pytest.fixture
def leaves_nothing():
    """A context that must end with the tasks and the descriptors with which it began."""

    @asynccontextmanager
    async def leaves_nothing_():
        tasks, descriptors = asyncio.all_tasks(), _descriptors()
        yield
        deadline = asyncio.get_running_loop().time() + 10
        left: Any = True
        while left and asyncio.get_running_loop().time() < deadline:  # what is being closed needs a few rounds
            await asyncio.sleep(0.01)
            gc.collect()
            left = [*(asyncio.all_tasks() - tasks), *(_descriptors() - descriptors)]
        assert not left, left

    return leaves_nothing_


@pytest.fixture
def open_session():
    def open_(recorder, session_id="episode-1", *, turn_budget=100, token_budget=100_000, **options):
        return recorder.open_session(session_id, turn_budget=turn_budget, token_budget=token_budget, **options)

    return open_
