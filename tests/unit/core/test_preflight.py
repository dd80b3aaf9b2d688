"""What cannot start is refused before anything is prepared: no environment is made, no torch imported, nothing left."""

import socket
import sys

import pytest

from sparring import preflight
from sparring.cli import main
from sparring.config import EngineConfig
from sparring.errors import ConfigError
from sparring.preflight import check_engine

# The environment is not there either: whoever prepared it first would name it.
CONFIG = "model: {path: tiny-qwen3}\nenv: {id: sparring/Nowhere-v0}\n"


@pytest.fixture
def refusal(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(CONFIG)

    def _refusal(*overrides: str, command: tuple[str, ...] = ("train",)) -> str:
        before = set(sys.modules)
        assert main([*command, "x.yaml", *overrides]) == 2
        assert "torch" not in set(sys.modules) - before
        assert not (tmp_path / "runs").exists()
        return capsys.readouterr().err

    return _refusal


@pytest.fixture
def gpu(monkeypatch):
    """Makes this machine one with a GPU, or one without."""
    return lambda there: monkeypatch.setattr(preflight, "_GPU_NODES", ("null",) if there else ())


@pytest.mark.parametrize("path", ["/nowhere", ".", "no-such-model", "a/b/c"])
def test_a_model_that_is_not_there_is_refused_first(refusal, path):
    assert f"model.path={path!r} is no Hugging Face folder" in refusal(f"model.path={path}")


def test_a_model_of_a_hub_that_does_not_answer_is_refused_unless_it_is_in_the_cache(refusal, monkeypatch):
    monkeypatch.setattr("sparring.backend.models.hub_answers", lambda: False)
    assert "does not answer, and the model is not in its cache" in refusal("model.path=nobody/nothing")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    assert "Nowhere" in refusal("model.path=nobody/nothing")


def test_a_folder_that_is_taken_hides_nothing_else(refusal, gpu, tmp_path):
    gpu(False)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text(CONFIG)
    folder, device, env = refusal("run_dir=taken", "trainer.device=cuda").splitlines()
    assert folder.startswith("error: taken holds a run already: add --resume")
    assert device.startswith("besides: trainer.device=cuda, and this machine shows no GPU")
    assert env.startswith("besides: ")
    assert "Nowhere" in env
    (alone,) = refusal("run_dir=taken", "env.id=sparring/KeyLookup-v0").splitlines()
    assert alone == folder


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        ("gspoo", 'objective.name="gspoo": there is no such objective; did you mean gspo?'),
        ("mine.py:make", "objective.name: there is no file mine.py"),
    ],
)
def test_an_objective_that_is_not_there_is_refused(refusal, objective, told):
    assert told in refusal(f"objective={objective}")


def test_a_run_folder_that_cannot_be_made_is_refused(refusal, tmp_path):
    (tmp_path / "file").touch()
    folder, env = refusal("run_dir=file/of/a/run", "trainer.report_to=[tensorboard]").splitlines()
    assert folder == "error: run_dir: cannot write to file/of/a/run: Not a directory"
    assert "Nowhere" in env


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_servers_without_a_gpu_are_refused(refusal, gpu, engine):
    gpu(False)
    assert f"engine.type={engine} starts servers on a GPU" in refusal(f"engine.type={engine}")
    assert "Nowhere" in refusal(f"engine.type={engine}", "engine.urls=[http://127.0.0.1:1]")


def test_servers_without_their_python_are_refused(refusal, gpu, tmp_path):
    gpu(True)
    assert "engine.python='/no/python' is no program" in refusal("engine.type=sglang", "engine.python=/no/python")
    assert f"{sys.executable} has no sglang: set engine.python" in refusal("engine.type=sglang")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    check_engine(EngineConfig(type="sglang", environment={"PYTHONPATH": str(tmp_path)}))


@pytest.mark.parametrize("key", ["engine.device", "trainer.device"])
def test_a_gpu_that_is_asked_for_and_is_not_there_is_refused(refusal, gpu, key):
    gpu(False)
    assert f"{key}=cuda, and this machine shows no GPU" in refusal(f"{key}=cuda")
    assert "Nowhere" in refusal(f"{key}=auto")


def test_an_engine_that_samples_on_the_cpu_needs_nothing(gpu):
    gpu(False)
    check_engine(EngineConfig(device="cpu"))
    with pytest.raises(ConfigError, match=r"engine\.device=cuda:1"):
        check_engine(EngineConfig(device="cuda:1"))


def test_a_port_in_use_is_told_before_a_model_is_loaded(refusal):
    serve = ("serve", "inference")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refusal("--port", str(port), "model.path=/nowhere", command=serve)
        assert told.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
        assert "in use; choose another port" in told
    assert "port 70000 does not exist" in refusal("--port", "70000", command=serve)
    assert "model.path='/nowhere'" in refusal("--port", str(port), "model.path=/nowhere", command=serve)
