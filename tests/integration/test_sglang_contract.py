"""The engine contract over SGLang's endpoints: against the stand-in, and on a GPU against SGLang itself.

Where `SPARRING_SGLANG_PYTHON` names the Python of an environment with SGLang (and `SPARRING_SGLANG_PATH` its
PYTHONPATH, if it needs one), the server is the real one. A server takes minutes to start there, so all tests share it.
"""

import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from sparring.backend.engines.fake_sglang import FakeSGLang
from sparring.backend.engines.sglang import ServerOptions, SGLangEngine, SGLangServer
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.errors import EngineError

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))
pytest.register_assert_rewrite("engine_contract", "remote_contract")
from remote_contract import RemoteContract, random_model  # noqa: E402

REAL = os.environ.get("SPARRING_SGLANG_PYTHON")
DEVICE = "cuda" if REAL else "cpu"

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model(DEVICE).save_pretrained(path)
    return path


@asynccontextmanager
async def server(folder: Path, *, reports_versions: bool, seeds: bool, log: Path):
    """The URL of a server that holds the model in `folder`."""
    if REAL is None:
        torch_engine = TorchEngine(folder, slots=8, max_length=256, dtype="bfloat16", device="cpu")
        async with FakeSGLang(torch_engine, folder, reports_versions=reports_versions, seeds=seeds).serve() as url:
            yield url
        return
    options = ServerOptions(
        python=REAL,
        memory_fraction=0.3,
        max_running=64,
        deterministic=seeds,
        extra=("--skip-tokenizer-init",),
        environment={"PYTHONPATH": os.environ.get("SPARRING_SGLANG_PATH", "")},
    )
    plain = None if reports_versions else (REAL, "-m", "sglang.launch_server")
    process = SGLangServer(folder, options, max_length=256, log_path=log, command=plain)
    yield await process.start()
    await process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["hooked", "plain"])
async def url(request, folder, tmp_path_factory):
    hooked = request.param == "hooked"
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    async with server(folder, reports_versions=hooked, seeds=True, log=log) as address:
        yield address


class TestSGLangKeepsTheContract(RemoteContract):
    device = DEVICE

    @pytest.fixture
    def make_engine(self, folder, url):
        return lambda: SGLangEngine(folder, url=url, max_length=self.max_length)


async def test_a_model_that_is_no_folder_is_said_before_anything_starts(tmp_path):
    with pytest.raises(EngineError, match="is no model folder"):
        SGLangEngine(tmp_path, url="http://127.0.0.1:1", max_length=16)
