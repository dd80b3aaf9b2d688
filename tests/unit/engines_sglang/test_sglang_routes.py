"""Which way new weights go to a server."""

import socket

import pytest
import torch

from sparring.backend.engines.sglang.options import choose_route
from sparring.backend.engines.sglang.protocol import ServerInfo, parse_server_info
from sparring.errors import EngineError

HERE, AWAY = "http://127.0.0.1:30000", "http://10.1.2.3:30000"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def server(**fields):
    return ServerInfo("0.5.17", "model", (), 0, False, False, **fields)


@pytest.mark.parametrize(
    ("device", "info", "url", "route"),
    [
        (GPU, server(), HERE, "ipc"),
        (GPU, server(), f"http://{socket.gethostname()}:1", "ipc"),
        (GPU, server(gpu=1), HERE, "group"),
        (GPU, server(ranks=2), HERE, "group"),
        (GPU, server(), AWAY, "group"),
        (CPU, server(), HERE, "disk"),
        (CPU, server(), AWAY, "group"),
    ],
    ids=["one GPU", "by name", "another GPU", "several GPUs", "another machine", "CPU", "CPU, another machine"],
)
def test_where_nothing_is_said_what_both_share_decides(device, info, url, route):
    assert choose_route(None, device, info, url) == route


@pytest.mark.parametrize("wanted", ["ipc", "disk", "group"])
def test_what_is_said_holds(wanted):
    assert choose_route(wanted, CPU, server(), HERE) == wanted


@pytest.mark.parametrize(
    ("info", "url", "said"), [(server(), AWAY, "another machine"), (server(ranks=4), HERE, "has 4")]
)
def test_memory_that_cannot_be_shared_is_refused(info, url, said):
    with pytest.raises(EngineError, match=said):
        choose_route("ipc", GPU, info, url)


def test_what_a_server_says_of_its_place_is_read():
    said = {"version": "0.5.17", "base_gpu_id": 3, "tp_size": 2, "dtype": "half"}
    info = parse_server_info(said, {"model_path": "m"}, HERE)
    assert (info.gpu, info.ranks, info.dtype) == (3, 2, "float16")
    assert parse_server_info({"version": "1", "dtype": "auto"}, {"model_path": "m"}, HERE).dtype is None
