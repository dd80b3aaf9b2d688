"""Weights of a run are nobody else's, also for the moment in which they lie in shared memory."""

import os
import stat

import pytest
from safetensors.torch import load_file

from sparring.backend.engines.remote.folder import write_folder
from sparring.backend.engines.remote.layout import WeightLayout


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_new_weights_can_be_read_by_their_owner_alone(tiny_qwen3):
    tensors = load_file(tiny_qwen3 / "model.safetensors")
    with write_folder(3, tensors.items(), WeightLayout.of_model(tiny_qwen3)) as folder:
        modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(folder)}
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert modes == {"model.safetensors": 0o600, "config.json": 0o600}
