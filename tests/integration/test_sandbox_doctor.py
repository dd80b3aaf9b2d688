"""`sparring doctor` says what there is, with a daemon and without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CALL = "import sys; from sparring.doctor import doctor; sys.exit(doctor(sys.argv[1:]))"


def run_doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | env)


@pytest.mark.docker
@pytest.mark.bubblewrap
def test_with_a_daemon() -> None:
    run = run_doctor("--json")
    found = json.loads(run.stdout)
    assert run.returncode == 0
    assert found["auto"] == "docker"
    for kind in ("docker", "bubblewrap"):
        assert found[kind]["user"] == "1000"
        assert int(found[kind]["capabilities"], 16) == 0
        assert found[kind]["no new privileges"] == "1"
        assert found[kind]["seccomp"] == "2"
        assert found[kind]["system folders"] == "read-only"
        assert found[kind]["network devices"].startswith("1 ")
        assert float(found[kind]["exec"].split()[0]) > float(found[kind]["exec in a session"].split()[0])
    assert "sparring/python:latest" in found["docker"]["images"]
    assert found["docker"]["storage driver"]
    assert found["docker"]["version"]


@pytest.mark.bubblewrap
def test_without_a_daemon(tmp_path: Path) -> None:
    run = run_doctor(DOCKER_HOST=f"unix://{tmp_path}/nothing")
    assert run.returncode == 0
    assert "no Docker daemon answers" in " ".join(run.stdout.split())
    assert "sandbox=auto takes bubblewrap" in run.stdout


def test_with_nothing(tmp_path: Path) -> None:
    nothing = "import sparring.sandbox.bubblewrap as b; b._HOST_ENV['PATH'] = '/nothing'; " + CALL
    environment = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/nothing"}
    run = subprocess.run([sys.executable, "-c", nothing], capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == 1
    assert "sandbox=auto refuses" in run.stdout
    assert "apt-get install bubblewrap" in " ".join(run.stdout.split())
