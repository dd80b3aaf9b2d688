"""One rank of data-parallel steps on the tiny model: `python trainer_process.py MODEL OUT SETTINGS`.

Ranks come by torch's environment variables. Rank 0 writes the last step's gradients and metrics to OUT, and the weights
at the end. SETTINGS is JSON: `objective`, `trainer` (knobs), `run_dir`, `resume`; each may be left out.
"""

import json
import os
import queue
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

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

    def init_weight_transfer(self): ...
    def pause(self): ...
    def resume(self): ...
    def destroy(self): ...

    def send_weights(self, iterator):
        list(iterator)


def main(model: str, out: str, settings: str) -> None:
    torch.set_num_threads(1)
    given = json.loads(settings)
    knobs = {"steps": 1, "dtype": "float32", "token_budget": 45, "checkpoint_every": 0, "device": "cpu"}
    config = RunConfig(
        model=ModelConfig(path=model),
        env=EnvConfig(id="test/Random-v0"),
        objective=ObjectiveConfig(name=given.get("objective", "default")),
        trainer=TrainerConfig.model_validate_json(json.dumps(knobs | given.get("trainer", {}))),
    )
    run_dir = Path(given.get("run_dir", Path(out).with_suffix(".run")))
    trainer = AgentTrainer(model, config, Source(), Publisher(), run_dir=run_dir)
    gradients = {}
    clip = trainer._clip_grad_norm

    def keep_gradients(wrapped):
        gradients.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
        return clip(wrapped)

    trainer._clip_grad_norm = keep_gradients
    trainer.train(resume=given.get("resume", False))
    if trainer.accelerator.is_main_process:
        weights = {n: p.detach() for n, p in trainer._policy.named_parameters() if p.requires_grad}
        torch.save({"gradients": gradients, "record": trainer._record, "weights": weights}, out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
