"""Which task comes next: each once an epoch, in an order that depends on seed and epoch alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.backend.rollout import TaskSampler
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
