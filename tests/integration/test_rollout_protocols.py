"""TRL's two seams, by name and signature: an upgrade of TRL says here what moved."""

import inspect

import pytest

from sparring.backend.rollout import RolloutWorker
from sparring.backend.weights import WeightPublisher

pytestmark = pytest.mark.slow  # importing the trainer takes seconds


def methods(protocol: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(member).parameters)
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


def test_the_worker_and_the_publisher_have_every_method_of_trls_protocols():
    trainer = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    assert set(methods(trainer.RolloutWorkerProtocol)) == {
        "start",
        "stop",
        "update_model_version",
        "check_health",
    }
    assert set(methods(trainer.WeightTransferProtocol)) == {
        "init_weight_transfer",
        "pause",
        "send_weights",
        "resume",
        "destroy",
    }
    for protocol, ours in (
        (trainer.RolloutWorkerProtocol, RolloutWorker),
        (trainer.WeightTransferProtocol, WeightPublisher),
    ):
        for name, parameters in methods(protocol).items():
            own = inspect.signature(getattr(ours, name)).parameters
            assert list(own)[: len(parameters)] == parameters
            assert all(p.default is not p.empty for p in list(own.values())[len(parameters) :])
    assert set(trainer.RolloutWorkerProtocol.__annotations__) == {"rollout_buffer", "metrics_queue"}
