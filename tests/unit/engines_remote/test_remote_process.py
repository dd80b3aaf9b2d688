import os
import sys

import pytest

from sparring.backend.engines.remote.process import ProcessOptions
from sparring.backend.engines.vllm import VLLMServer
from sparring.errors import EngineError


async def test_a_server_knows_nothing_of_the_ranks_of_the_run(tiny_qwen3, tmp_path, monkeypatch):
    """Else a server of rank 0's would meet torchrun's store, and wait there for the other ranks."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    for name in (*ranks, "OURS"):
        monkeypatch.setenv(name, "1")
    asks = f"import os; raise SystemExit([name for name in {(*ranks, 'OURS', 'ASKED_FOR')!r} if name in os.environ])"
    options = ProcessOptions(environment={"ASKED_FOR": "1", "WORLD_SIZE": "1"})
    command = (sys.executable, "-c", asks)
    server = VLLMServer(tiny_qwen3, options, max_length=8, log_path=tmp_path / "log", command=command)
    with pytest.raises(EngineError, match=r"\['WORLD_SIZE', 'OURS', 'ASKED_FOR'\]"):
        await server.start()


async def test_a_server_that_was_stopped_is_not_killed_again(tiny_qwen3, tmp_path, monkeypatch):
    """By then its process's number may be another program's."""
    server = VLLMServer(tiny_qwen3, ProcessOptions(), max_length=8, log_path=tmp_path / "log", command=("false",))
    with pytest.raises(EngineError, match="exit status 1"):
        await server.start()
    killed = []
    monkeypatch.setattr(os, "killpg", lambda group, _signal: killed.append(group))
    await server.stop()
    assert not killed
