"""One rank of data-parallel steps on the tiny model: `python trainer_process.py MODEL OUT SETTINGS`.

Ranks come by torch's environment variables. Rank 0 writes to OUT the last step's gradients and metrics, the weights at
the end, those that it published last, how many numbers it holds of parameters and moments, and what the probe found.
SETTINGS is JSON: `objective` (name, kwargs), `trainer` (knobs), `run_dir`, `resume`, `probe`, and `signal` (number,
rank, step), which a rank sends to itself while it clips the gradient of a step; each may be left out.
"""

import json
import os
import queue
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from sparring.backend.trainer.sharding import whole, whole_parameters
from sparring.backend.trainer.trainer import AgentTrainer
from sparring.config import EnvConfig, ModelConfig, ObjectiveConfig, RunConfig, TrainerConfig
from sparring.types import Group, StopReason, TokenSequence, Trajectory, Turn


def make_groups(version: int) -> tuple[Group, ...]:
    rng = np.random.default_rng(version)
    groups = []
    for g in range(3):
        prompt = rng.integers(0, 250, 12)
        members = []
        for i in range(3):
            ids = np.concatenate([prompt, rng.integers(0, 250, rng.integers(3, 9))])
            mask = np.arange(len(ids)) >= 12
            logprobs = np.where(mask, rng.normal(-5.5, 0.3, len(ids)), 0)
            sequence = TokenSequence(ids, mask, logprobs, np.where(mask, 0, -1), (Turn(12, len(ids)),))
            members.append(
                Trajectory(f"e{g}{i}", f"g{g}", "env", "t", 0, (sequence,), float(rng.random()), StopReason.FINISHED)
            )
        groups.append(Group(f"g{g}", tuple(members)))
    return tuple(groups)


class Source:
    rollout_buffer: queue.Queue = queue.Queue()
    metrics_queue: queue.Queue = queue.Queue()

    def start(self): ...
    def stop(self): ...
    def update_model_version(self, version): ...
    def check_health(self, stale_after_s): ...

    def next_batch(self, version, timeout_s):
        assert int(os.environ.get("RANK", "0")) == 0, "the main rank alone asks for batches"
        return SimpleNamespace(groups=make_groups(version), stats={})


class Publisher:
    next_version = 0
    published: dict[str, torch.Tensor]

    def init_weight_transfer(self): ...
    def pause(self): ...
    def resume(self): ...
    def destroy(self): ...

    def send_weights(self, iterator):
        self.published = {name: tensor.clone() for name, tensor in iterator}


def held(tensors) -> int:
    """Numbers that are on this rank."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


def main(model: str, out: str, settings: str) -> None:
    torch.set_num_threads(1)
    given = json.loads(settings)
    knobs = {"steps": 1, "dtype": "float32", "token_budget": 45, "checkpoint_every": 0, "device": "cpu"}
    if given.get("probe"):
        knobs["max_logprob_drift"] = 100.0  # of random tokens that nobody sampled
    config = RunConfig(
        model=ModelConfig(path=model),
        env=EnvConfig(id="test/Random-v0"),
        objective=ObjectiveConfig(**given.get("objective", {"name": "default"})),
        trainer=TrainerConfig.model_validate_json(json.dumps(knobs | given.get("trainer", {}))),
    )
    run_dir = Path(given.get("run_dir", Path(out).with_suffix(".run")))
    publisher = Publisher()
    probed = [t.sequences[0] for group in make_groups(0) for t in group.trajectories]
    probe = {"probe_sequences": lambda: probed} if given.get("probe") else {}
    trainer = AgentTrainer(model, config, Source(), publisher, run_dir=run_dir, **probe)
    gradients = {}
    clip = trainer._clip_grad_norm
    number, *whom = given.get("signal", (0, -1, -1))

    def keep_gradients(wrapped):
        gradients.update({n: whole(p.grad).clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
        if whom == [trainer.accelerator.process_index, trainer.state.global_step + 1]:
            os.kill(os.getpid(), number)
        return clip(wrapped)

    trainer._clip_grad_norm = keep_gradients
    trainer.train(resume=given.get("resume", False))
    trained = {n for n, p in trainer._policy.named_parameters() if p.requires_grad}
    weights = {n: t.clone() for n, t in whole_parameters(trainer._policy) if n in trained}
    if trainer.accelerator.is_main_process:
        drift = vars(trainer.drift) if trainer.drift else None
        found = {"gradients": gradients, "record": trainer._record, "weights": weights}
        moments = (t for state in trainer.optimizer.state.values() for t in state.values())
        holds = {"parameters": held(trainer._policy.parameters()), "moments": held(moments)}
        torch.save(found | {"published": publisher.published, "drift": drift, "held": holds}, out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
