"""What a curriculum learned comes back with the buffer."""

from sparring.backend.rollout import Curriculum
from sparring.types import EpisodeResult, EpisodeSpec, StopReason


class Diary(Curriculum):
    """Remembers its lessons."""

    def __init__(self, sampler):
        super().__init__(sampler)
        self.lessons = {}

    def learn(self, spec, rewards):
        super().learn(spec, rewards)
        self.lessons[spec] = sorted(rewards)


def one_open_task(spec: EpisodeSpec) -> EpisodeResult:
    """Members differ in reward on one of the tasks alone."""
    member = int(spec.episode_id.split(".")[-2])
    return EpisodeResult(StopReason.FINISHED, reward=float(member if spec.task_id == "train-0" else 1))


def test_a_resumed_curriculum_knows_what_was_measured_and_goes_on_where_it_was(make_rig):
    values = {"play": one_open_task, "tasks": 4, "sampler_class": Diary, "config": {"groups_per_step": 1}}
    rig = make_rig(**values)
    rig.worker.start()
    batches = rig.train(1, 8)
    rig.close()
    assert sum(batch.stats["groups/skipped"] for batch in batches) > 0
    assert {spec.task_id for spec in rig.sampler.lessons} > {"train-0"}  # dropped groups teach too

    again = make_rig(**values)
    again.worker.open()
    again.publish(8)
    again.worker.start()
    assert again.sampler.lessons.items() >= rig.sampler.lessons.items()
    again.train(9, 9)
    finished = {spec.group_id for spec in rig.sampler.lessons}
    assert finished.isdisjoint(spec.group_id for _, spec in again.started)  # nothing is drawn twice
