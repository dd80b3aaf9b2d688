"""`trainer.keep_best`: the checkpoints of the best evaluations stay, at any staleness, and across a resume."""

from dataclasses import dataclass

import pytest

from sparring.backend.trainer.trainer import AgentTrainer
from sparring.config import EvalConfig

pytestmark = pytest.mark.slow


@dataclass
class Evaluation:
    reward: float
    finished: bool

    def done(self):
        return self.finished

    def result(self):
        return {"reward": self.reward}


@pytest.fixture
def train(tiny_qwen3, tmp_path, kit):
    def run(rewards, *, finished=True, resume=False, **trainer):
        config = kit.make_config(**trainer).model_copy(update={"eval": EvalConfig(every=1)})
        AgentTrainer(
            tiny_qwen3,
            config,
            kit.source(),
            kit.KeepingPublisher(),
            run_dir=tmp_path,
            evaluate=lambda step, beside: Evaluation(rewards[step], finished or not beside),
        ).train(resume)
        return sorted(int(p.name.partition("-")[2]) for p in tmp_path.glob("checkpoint-*"))

    return run


@pytest.mark.parametrize("finished", [True, False], ids=["at once", "only when waited for"])
def test_the_best_checkpoints_stay_beside_the_newest(train, finished):
    rewards = {0: 0.9, 1: 0.2, 2: 0.6, 3: 0.6, 4: 0.7, 5: 0.1}
    assert train(rewards, finished=finished, steps=5, keep_best=2, keep_checkpoints=1) == [2, 4, 5]


def test_without_it_the_newest_alone_stay(train):
    assert train({0: 0.0, 1: 0.9, 2: 0.1, 3: 0.1}, steps=3, keep_checkpoints=1) == [3]


def test_a_resumed_run_remembers_which_were_best(train):
    assert train({0: 0.0, 1: 0.9, 2: 0.1}, steps=2, keep_best=1, keep_checkpoints=1) == [1, 2]
    rewards = {3: 0.8, 4: 0.1}
    assert train(rewards, steps=4, keep_best=1, keep_checkpoints=1, resume=True) == [1, 4]
