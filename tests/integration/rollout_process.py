"""A run without a model, in a process of its own, made to be ended: `rollout_process.py FOLDER LAST_STEP`.

It trains by writing down which episodes it trained on. Its checkpoint, saved every other step, holds that list up to
its step: the history that survives. `stored.log` is a witness beside the buffer, of every episode whose storing
returned.
"""

import json
import os
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models

from sparring.backend.buffer import TrajectoryBuffer
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.gateway.formats import get_format
from sparring.backend.gateway.template import ChatTemplate
from sparring.backend.rollout import RolloutWorker, TaskSampler
from sparring.backend.weights import WeightPublisher
from sparring.config import RolloutConfig
from sparring.types import EpisodeResult, EpisodeSpec, Failure, Message, StopReason, Trajectory

END = 1
CONFIG = RolloutConfig(group_size=4, groups_per_step=2, staleness=2, max_running_groups=6)


class WitnessedBuffer(TrajectoryBuffer):
    def store(self, trajectory: Trajectory, *, evaluation: bool = False) -> None:
        super().store(trajectory, evaluation=evaluation)
        with self.path.with_name("stored.log").open("a") as log:
            log.write(f"{trajectory.episode_id}\n")


def word_chat() -> ChatFormat:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "<end>": END, "yes": 2}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}<end>{% endfor %}", {})
    return ChatFormat(tokenizer, template, get_format("hermes"))


async def run_episode(spec: EpisodeSpec, session) -> EpisodeResult:
    dice = random.Random(spec.episode_id)
    for _ in range(dice.randint(1, 3)):
        await session.chat([Message("user", "yes ?")])
    if dice.random() < 0.1:
        return EpisodeResult(StopReason.FAILED, failure=Failure("sandbox", "gone"))
    return EpisodeResult(StopReason.FINISHED, reward=float(dice.random() < 0.3))


def main(folder: Path, last_step: int) -> None:
    saved = folder / "checkpoint.json"
    trained: dict[str, list[str]] = json.loads(saved.read_text()) if saved.exists() else {}
    buffer = WitnessedBuffer.open(folder / "buffer.db")
    engine = ScriptedEngine(lambda prompt: [2, END])
    worker = RolloutWorker(
        engine=engine,
        recorder=Recorder(engine, word_chat(), SamplingParams(max_new_tokens=4), max_length=64),
        run_episode=run_episode,
        sampler=TaskSampler("x/X-v0", [f"train-{i}" for i in range(7)], group_size=CONFIG.group_size, seed=0),
        config=CONFIG,
        buffer=buffer,
    )
    try:
        train(folder, last_step, worker, WeightPublisher(worker, engine), trained, buffer)
    finally:
        worker.stop()
        buffer.close()


def train(
    folder: Path,
    last_step: int,
    worker: RolloutWorker,
    publisher: WeightPublisher,
    trained: dict[str, list[str]],
    buffer: TrajectoryBuffer,
) -> None:
    step = len(trained)
    worker.update_model_version(step)
    publisher.init_weight_transfer()
    publisher.publish(step, [])
    worker.start()
    print(f"resumed at {step}", flush=True)
    while step < last_step:
        batch = worker.next_batch(step, timeout_s=30)
        assert batch.stats["lag/max"] <= CONFIG.staleness, batch.stats
        step = batch.step
        trained[str(step)] = [t.episode_id for g in batch.groups for t in g.trajectories]
        publisher.publish(step, [])
        worker.update_model_version(step)
        if step % 2 == 0:
            (folder / "checkpoint.tmp").write_text(json.dumps(trained))
            os.replace(folder / "checkpoint.tmp", folder / "checkpoint.json")
            buffer.prune(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
