"""Runs by the command line on the stand-in for SGLang: a step's drift shows whether it samples from what was sent."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENVS = Path(__file__).parent / "run_envs"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ENVS)}
COMMAND = [sys.executable, "-m", "sparring.cli"]


@contextmanager
def served(*arguments):
    """The URL of a server that runs until the end."""
    with subprocess.Popen(
        [*COMMAND, "serve", "inference", *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"'engine\.urls=(.*)'", line)
            assert found is not None, line
            yield json.loads(found[1])[0]
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def config(noisy_config):
    return str(
        noisy_config(
            rollout={"max_turns": 2, "staleness": 0},
            trainer={"steps": 2, "learning_rate": 1e-2},
            eval={"every": 1, "tasks": 2, "during_training": "stall"},
        )
    )


def steps_of_a_run(config, url, *arguments):
    attached = ["engine.type=sglang", f'engine.urls=["{url}"]', *arguments]
    # Into a file: torch's manager of shared memory inherits the output and lives as long as the server has a mapping.
    said = Path(config).parent / "said.txt"
    with said.open("w") as output:
        done = subprocess.run(
            [*COMMAND, "train", config, *attached], env=ENVIRONMENT, stdout=output, stderr=output, timeout=400
        )
    assert done.returncode == 0, said.read_text()
    metrics = (Path(config).parent / "run" / "metrics.jsonl").read_text()
    return [record for line in metrics.splitlines() if (record := json.loads(line))["kind"] == "step"]


@pytest.mark.parametrize(
    "options",
    [
        ["engine.weights=group", "engine.bucket_mib=1"],
        ["engine.weights=ipc", "engine.bucket_mib=1", "engine.release_memory=true"],
    ],
    ids=["by a group in pieces", "with lent memory"],
)
def test_a_synchronous_run_samples_from_its_newest_weights(config, options):
    with served(config) as url:
        steps = steps_of_a_run(config, url, *options)
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["drift/max/lag0"] < 1e-3 for record in steps)


def test_a_run_that_trains_an_adapter_samples_from_it_unmerged(config):
    adapter = ["engine.lora=adapter", "trainer.lora={rank: 4, alpha: 8}"]
    with served(config, *adapter) as url:
        steps = steps_of_a_run(config, url, *adapter)
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["drift/max/lag0"] < 1e-3 for record in steps)
