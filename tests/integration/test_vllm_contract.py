"""The engine contract over vLLM's endpoints: against the stand-in, and on a GPU against vLLM itself.

Where `SPARRING_VLLM_PYTHON` names the Python of an environment with vLLM (and `SPARRING_VLLM_PATH` its PYTHONPATH, if
it needs one), the server is the real one. A server takes minutes to start there, so all tests share it.
"""

import os
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from sparring.backend.engines.fake_vllm import FakeVLLM
from sparring.backend.engines.remote.process import ProcessOptions
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.backend.engines.vllm import VLLMEngine, VLLMServer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))
pytest.register_assert_rewrite("engine_contract", "remote_contract")
from remote_contract import RemoteContract, random_model  # noqa: E402

REAL = os.environ.get("SPARRING_VLLM_PYTHON")
DEVICE = "cuda" if REAL else "cpu"
KEY = "a key of the tests"

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model(DEVICE).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["spans"] if REAL else ["spans", "plain"])
async def address(request, folder, tmp_path_factory):
    """URL and key of a server that holds the model in `folder`; "plain" is one that names no versions."""
    if REAL is None:
        engine = TorchEngine(folder, slots=8, max_length=256, dtype="bfloat16", device="cpu")
        fake = FakeVLLM(engine, folder, key=KEY, max_length=256, reports_versions=request.param == "spans")
        async with fake.serve() as url:
            yield url, KEY
        return
    options = ProcessOptions(
        python=REAL,
        memory_fraction=0.3,
        max_running=64,
        extra=("--skip-tokenizer-init",),
        environment={"PYTHONPATH": os.environ.get("SPARRING_VLLM_PATH", "")},
    )
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    process = VLLMServer(folder, options, max_length=256, log_path=log)
    yield await process.start(), process.key
    await process.stop()


class TestVLLMKeepsTheContract(RemoteContract):
    device = DEVICE

    @pytest.fixture
    def make_engine(self, folder, address):
        url, key = address
        return lambda: VLLMEngine(folder, url=url, key=key, max_length=self.max_length)
