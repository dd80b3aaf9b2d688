"""Without a network whoever needs the hub is told so in seconds, not after its client's retries."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from sparring import hub

# Each prints how long the answer took, without the imports, and the answer.
GSM8K = "GSM8K().task_ids('train')"
PROMPTS = "load_prompts('nobody/nothing', 'train')"
MODEL = "resolve_model('nobody/nothing')"
CODE = """
import time, datasets, huggingface_hub
from sparring.backend.models import resolve_model
from sparring.envs.gsm8k import GSM8K
from sparring.envs.prompt_data import load_prompts
began = time.monotonic()
try:
    {call}
except Exception as error:
    print(time.monotonic() - began, type(error).__name__, error)
"""


def ask(call: str, endpoint: str, home) -> tuple[float, str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment.pop("SPARRING_DATA", None)
    command = [sys.executable, "-c", CODE.format(call=call)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    seconds, _, error = done.stdout.partition(" ")
    return float(seconds), error


@pytest.fixture
def listener():
    """An address where connections are taken and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (GSM8K, "or set SPARRING_DATA to a folder"),
        (PROMPTS, "'nobody/nothing' is no file"),
        (MODEL, "model.path='nobody/nothing' is no folder"),
    ],
    ids=["gsm8k", "prompts", "model"],
)
def test_a_hub_that_cannot_be_reached_is_given_up_at_once(tmp_path, listener, call, expected):
    port = listener.getsockname()[1]
    listener.close()
    seconds, error = ask(call, f"http://127.0.0.1:{port}", tmp_path)
    assert expected in error
    assert f"http://127.0.0.1:{port} does not answer" in error
    assert seconds < 5


@pytest.mark.slow
def test_a_hub_that_is_silent_is_given_up_after_seconds(tmp_path, listener):
    seconds, error = ask(MODEL, f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path)
    assert "does not answer" in error
    assert seconds < 8


@pytest.mark.slow  # imports datasets
def test_the_cache_alone_is_looked_into_only_while_the_hub_does_not_answer(monkeypatch):
    import datasets

    for answers in (True, False):
        monkeypatch.setattr(hub, "hub_answers", lambda answers=answers: answers)
        before = datasets.config.HF_HUB_OFFLINE
        with hub.hub_or_cache():
            assert datasets.config.HF_HUB_OFFLINE is (before if answers else True)
        assert datasets.config.HF_HUB_OFFLINE is before


@pytest.mark.slow  # imports datasets
def test_two_threads_that_look_into_the_cache_leave_the_switch_as_it_was(monkeypatch):
    import datasets

    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    before = datasets.config.HF_HUB_OFFLINE
    inside, first_left = threading.Event(), threading.Event()

    def second():
        with hub.hub_or_cache():
            inside.set()
            first_left.wait(10)

    with hub.hub_or_cache():
        thread = threading.Thread(target=second)
        thread.start()
        inside.wait(0.1)  # were it let in here, it would put back what the first has set
    first_left.set()
    thread.join(10)
    assert inside.is_set()
    assert datasets.config.HF_HUB_OFFLINE is before
