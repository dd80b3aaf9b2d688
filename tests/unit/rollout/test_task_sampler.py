"""Which task comes next: each once an epoch, in an order that depends on seed and epoch alone."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.backend.rollout import Curriculum, MixtureSampler, TaskSampler
from sparring.errors import TaskError


def sampler(size: int, seed: int = 0) -> TaskSampler:
    return TaskSampler("env/X-v0", [f"train-{i}" for i in range(size)], group_size=4, seed=seed)


def tasks(sampler: TaskSampler, start: int, count: int) -> list[str]:
    return [sampler.group(position).task_id for position in range(start, start + count)]


@given(size=st.integers(1, 60), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_every_epoch_has_every_task_once(size, seed, epoch):
    drawn = tasks(sampler(size, seed), epoch * size, size)
    assert sorted(drawn) == sorted(f"train-{i}" for i in range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second, other = (tasks(sampler(50, s), start, 50) for s, start in ((0, 0), (0, 50), (1, 0)))
    assert first != second
    assert first != other
    assert first != [f"train-{i}" for i in range(50)]
    assert first == tasks(sampler(50, 0), 0, 50)


def test_a_data_set_smaller_than_a_batch_goes_on_with_its_next_epoch():
    assert set(tasks(sampler(3), 0, 12)) == {"train-0", "train-1", "train-2"}


def test_groups_of_one_task_differ_in_id_and_seed():
    one, again = sampler(1).group(0), sampler(1).group(1)
    assert one.task_id == again.task_id
    assert (one.group_id, one.seed) != (again.group_id, again.seed)
    assert one.size == 4


def test_a_huge_data_set_costs_no_list():
    class Huge(list):
        def __len__(self):
            return 10**12

        def __getitem__(self, index):
            return f"train-{index}"

    assert len(set(tasks(TaskSampler("e/E-v0", Huge([1]), group_size=2, seed=0), 0, 1000))) == 1000


def test_an_empty_data_set_is_an_error():
    with pytest.raises(TaskError, match="no task in its split 'train'"):
        sampler(0)


def mixture(**weights: float) -> MixtureSampler:
    parts = [TaskSampler(f"env/{name}-v0", [f"train-{i}" for i in range(7)], group_size=4, seed=0) for name in weights]
    return MixtureSampler(list(zip(parts, weights.values(), strict=True)))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 200))
def test_any_start_of_a_mixture_holds_each_part_at_its_share(weights, count):
    sampler = mixture(**{f"E{i}": weight for i, weight in enumerate(weights)})
    drawn = Counter(sampler.group(position).env_id for position in range(count))
    for i, weight in enumerate(weights):
        assert abs(drawn[f"env/E{i}-v0"] - count * weight / sum(weights)) < len(weights)


def test_a_mixture_is_a_function_of_the_position_and_each_part_keeps_its_epochs():
    groups = [mixture(A=3, B=1).group(position) for position in range(28)]
    again = mixture(A=3, B=1)
    assert [again.group(position) for position in reversed(range(28))] == groups[::-1]
    assert [group.seq for group in groups] == list(range(28))
    assert len({(group.group_id, group.seed) for group in groups}) == 28
    of_b = [group.task_id for group in groups if group.env_id == "env/B-v0"]
    assert sorted(of_b) == [f"train-{i}" for i in range(7)]


def play(curriculum: Curriculum, count: int, rewards: dict[str, list[float]]) -> list[str]:
    """Draw groups; each gives its task's rewards."""
    position, drawn = 0, []
    for _ in range(count):
        spec = curriculum.group(position)
        position = spec.seq + 1
        curriculum.learn(spec, rewards[spec.task_id])
        drawn.append(spec.task_id)
    return drawn


OPEN, SOLVED, HOPELESS = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


def test_a_curriculum_prefers_tasks_whose_success_is_neither_0_nor_1():
    rewards = {f"train-{i}": (OPEN, SOLVED, HOPELESS)[i % 3] for i in range(30)}
    drawn = Counter(play(Curriculum(sampler(30)), 600, rewards))
    of_open = [drawn[task] for task, kind in rewards.items() if kind is OPEN]
    settled = [drawn[task] for task, kind in rewards.items() if kind is not OPEN]
    assert max(of_open) - min(of_open) <= 1  # epochs as ever
    assert min(settled) >= 2  # none is forgotten
    assert sum(settled) / len(settled) < 0.25 * sum(of_open) / len(of_open)


def test_a_task_that_is_no_longer_settled_takes_part_again():
    curriculum = Curriculum(sampler(4))
    for position in range(40):
        curriculum.learn(sampler(4).group(position), HOPELESS)
    spec = curriculum.group(40)
    curriculum.learn(spec, OPEN)
    drawn = play(curriculum, 20, dict.fromkeys([f"train-{i}" for i in range(4)], OPEN))
    assert spec.task_id in drawn


def test_a_curriculum_of_settled_tasks_alone_still_draws():
    rewards = {f"train-{i}": SOLVED for i in range(5)}
    assert len(play(Curriculum(sampler(5)), 50, rewards)) == 50


def test_what_a_curriculum_draws_is_what_stands_at_that_position():
    curriculum, plain, skipped = Curriculum(sampler(6)), sampler(6), 0
    for position in range(0, 30, 3):
        spec = curriculum.group(position)
        assert spec == plain.group(spec.seq)
        curriculum.learn(spec, SOLVED)
        skipped += spec.seq - position
    assert skipped > 0


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_a_curriculum_depends_on_what_it_learned_and_not_on_the_order(random):
    lessons = [(sampler(5).group(position), random.choice([OPEN, SOLVED])) for position in range(15)]
    one, other = Curriculum(sampler(5)), Curriculum(sampler(5))
    for spec, rewards in lessons:
        one.learn(spec, rewards)
    for spec, rewards in random.sample(lessons, len(lessons)):
        other.learn(spec, rewards)
    assert [one.group(p) for p in range(15, 30)] == [other.group(p) for p in range(15, 30)]


def test_a_group_with_one_survivor_says_nothing_about_a_rate():
    curriculum = Curriculum(sampler(1))
    curriculum.learn(curriculum.group(0), [1.0])
    assert [curriculum.group(position).seq for position in range(1, 10)] == list(range(1, 10))
