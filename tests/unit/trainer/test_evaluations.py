"""Who waits for an evaluation: the engine's new weights, within the staleness bound, or the trainer."""

import json
import shutil
from dataclasses import dataclass, field

import pytest

from sparring.backend.trainer.checkpoint import latest_checkpoint
from sparring.backend.trainer.trainer import AgentTrainer
from sparring.config import EvalConfig, RolloutConfig
from sparring.errors import TrainerError


@dataclass
class SlowEvaluation:
    """Not done before somebody waits for it, or a step is trained that `done_after` names."""

    step: int
    evaluations: "Evaluations"
    error: str | None = None
    success: float = 0.5

    def done(self):
        return self.evaluations.done_after in self.evaluations.source.asked

    def result(self):
        if self.error:
            raise TrainerError(self.error)
        self.evaluations.waited_at.append((self.step, len(self.evaluations.source.asked)))
        return {"success": self.success}


@dataclass
class Evaluations:
    source: object
    done_after: int = 10**6
    error: str | None = None
    success: float = 0.5
    begun: list[tuple[int, bool]] = field(default_factory=list)
    waited_at: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, step, *, beside):
        self.begun.append((step, beside))
        return SlowEvaluation(step, self, self.error if beside else None, self.success)


@pytest.fixture
def train(tiny_qwen3, tmp_path, kit):
    def train(*, staleness, mode="hold", steps=6, every=2, checkpoint_every=0, resume=False, **scripted):
        config = kit.make_config(steps=steps, checkpoint_every=checkpoint_every).model_copy(
            update={
                "eval": EvalConfig(every=every, during_training=mode),
                "rollout": RolloutConfig(staleness=staleness),
            }
        )
        source, publisher = kit.source(), kit.KeepingPublisher()
        evaluations = Evaluations(source, **scripted)
        trainer = AgentTrainer(tiny_qwen3, config, source, publisher, run_dir=tmp_path, evaluate=evaluations)
        trainer.train(resume)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        return evaluations, list(publisher.published), [json.loads(line) for line in lines]

    return train


@pytest.mark.slow
def test_training_goes_on_within_the_bound_while_an_evaluation_holds_the_weights(train):
    evaluations, published, records = train(staleness=2, steps=8, every=4)
    assert evaluations.begun == [(0, False), (4, True), (8, False)]
    assert published == [0, 1, 2, 3, 4, 7, 8]  # after step 7 the weights of 4 are three updates old: over the bound
    assert evaluations.waited_at == [(0, 0), (4, 7), (8, 8)]
    assert [(r["step"], r["steps_meanwhile"]) for r in records if r["kind"] == "evaluation"] == [(0, 0), (4, 3), (8, 0)]


@pytest.mark.slow
def test_an_evaluation_that_is_done_lets_the_next_weights_go_out(train):
    evaluations, published, _ = train(staleness=2, steps=8, every=4, done_after=4)
    assert evaluations.begun == [(0, False), (4, True), (8, False)]
    assert published == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_a_synchronous_run_trains_one_step_beside_an_evaluation_and_repeats_its_records(train):
    evaluations, published, records = train(staleness=0, steps=4)
    assert published == [0, 1, 2, 3, 4]
    assert evaluations.waited_at == [(0, 0), (2, 3), (4, 4)]
    assert [(r["kind"][0], r["step"]) for r in records] == [
        ("e", 0), ("s", 1), ("s", 2), ("s", 3), ("e", 2), ("s", 4), ("e", 4),
    ]  # fmt: skip


def test_an_evaluation_that_is_due_waits_for_the_one_before(train):
    evaluations, published, _ = train(staleness=9, steps=3, every=1)
    assert evaluations.begun == [(0, False), (1, True), (2, True), (3, False)]
    assert published == [0, 1, 2, 3]


def test_where_the_trainer_stalls_every_evaluation_is_waited_for(train):
    evaluations, published, records = train(staleness=2, steps=4, mode="stall")
    assert evaluations.begun == [(0, False), (2, False), (4, False)]
    assert published == [0, 1, 2, 3, 4]
    assert [r["steps_meanwhile"] for r in records if r["kind"] == "evaluation"] == [0, 0, 0]


def test_an_evaluation_that_fails_beside_training_ends_the_run(train):
    with pytest.raises(TrainerError, match="no end after 60 s"):
        train(staleness=1, steps=4, error="the evaluation has no end after 60 s")


def test_a_figure_that_is_not_finite_stops_the_run_and_blames_no_batch(train, tmp_path):
    with pytest.raises(TrainerError, match=r"step 0: not finite: \{'success': nan\}$"):
        train(staleness=1, success=float("nan"))
    assert not list(tmp_path.glob("rejected-batch-*"))


def killed_at(run_dir, step, *, evaluated):
    """As a kill leaves it: the checkpoint of `step` is the newest, and what came later may be in `metrics.jsonl`."""
    shutil.rmtree(run_dir / "checkpoint-4")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [r for r in records if r["kind"] == "step" or r["step"] < step or evaluated]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    assert latest_checkpoint(run_dir).name == f"checkpoint-{step}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "evaluated", "begun"),
    [
        (2, True, [(4, False)]),  # it is there, and not repeated
        (2, False, [(2, False), (4, False)]),  # it is missing, and made up for before anything else is trained
        (3, True, [(3, True), (4, False)]),  # not due at the step of the checkpoint: nobody asked for it
    ],
)
def test_a_resume_evaluates_what_is_due_and_missing_alone(train, tmp_path, every, evaluated, begun):
    train(staleness=1, steps=4, every=every, checkpoint_every=2)
    killed_at(tmp_path, 2, evaluated=evaluated)
    evaluations, _, records = train(staleness=1, steps=4, every=every, checkpoint_every=2, resume=True)
    assert evaluations.begun == begun
    steps = [r["step"] for r in records if r["kind"] == "evaluation"]
    assert sorted(steps) == sorted({0, 4, *range(0, 5, every)})
