"""What a run's episodes teach after it: which are imitated, and which are paired."""

import numpy as np
import pytest

from sparring.backend.buffer import BufferView, GroupSpec, TrajectoryBuffer
from sparring.backend.buffer.harvest import preference_pairs, rewarded_episodes
from sparring.errors import TaskError
from sparring.types import Failure, StopReason, TokenSequence, Trajectory, Turn

PROMPT = [7, 8, 9]
TOOL = [50, 51]


def sequence(said: list[int], then: list[int] = (), prompt: list[int] = PROMPT) -> TokenSequence:
    """A prompt, a first turn, and where there is a second one a tool's result before it."""
    tokens, mask = [*prompt, *said], [0] * len(prompt) + [1] * len(said)
    turns = [Turn(len(prompt), len(tokens), temperature=0.7)]
    if then:
        tokens, mask = [*tokens, *TOOL, *then], [*mask, *[0] * len(TOOL), *[1] * len(then)]
        turns.append(Turn(len(tokens) - len(then), len(tokens), temperature=0.7))
    return TokenSequence(tokens, mask, np.zeros(len(tokens)), np.where(mask, 0, -1), tuple(turns))


@pytest.fixture
def record(tmp_path):
    """Store a group of episodes, each (reward, sequences), and give a view of all groups so far."""
    buffer = TrajectoryBuffer.open(tmp_path / "buffer.sqlite")
    buffer.begin(0)

    def record(task: str, *episodes: tuple[float | None, tuple[TokenSequence, ...]], evaluation: bool = False):
        seq = buffer.next_seq
        spec = GroupSpec(seq, f"g{seq}", "env/X-v0", task, seed=seq, size=len(episodes))
        if not evaluation:
            buffer.start_group(spec)
        for member, (reward, sequences) in enumerate(episodes):
            episode = spec.episode(member)
            failure = Failure("sandbox", "gone") if reward is None else None
            trajectory = Trajectory(
                episode.episode_id, spec.group_id, spec.env_id, task, seq, sequences, reward, StopReason.FINISHED,
                failure=failure,
            )  # fmt: skip
            buffer.store(trajectory, evaluation=evaluation)
        if not evaluation:
            buffer.accept_group(spec.group_id)
        return buffer

    yield record
    buffer.close()


@pytest.fixture
def view(tmp_path, record):
    with BufferView(tmp_path / "buffer.sqlite") as view:
        yield view


def said(sequences) -> list[list[int]]:
    return [s.token_ids[s.action_mask].tolist() for s in sequences]


def test_only_training_episodes_with_enough_reward_are_imitated_at_temperature_1(record, view):
    record("a", (1.0, (sequence([1], [2]),)), (0.4, (sequence([3]),)), (None, (sequence([4]),)))
    record("b", (1.0, (sequence([5]),)), evaluation=True)
    harvest = rewarded_episodes(view, min_reward=1.0)
    assert said(harvest.sequences) == [[1, 2]]
    assert (harvest.episodes, harvest.tasks, harvest.repeats) == (1, 1, 0)
    assert harvest.sequences[0].action_mask.tolist() == [False] * 3 + [True, False, False, True]
    assert {turn.temperature for turn in harvest.sequences[0].turns} == {1.0}


def test_a_task_that_is_solved_often_does_not_drown_the_others_and_repeats_count_once(record, view):
    record("a", *((reward, (sequence([token]),)) for reward, token in [(1.0, 1), (2.0, 2), (1.0, 3), (1.0, 3)]))
    record("b", (1.0, (sequence([9]),)))
    assert said(rewarded_episodes(view, min_reward=1.0).sequences) == [[1], [2], [3], [9]]
    assert rewarded_episodes(view, min_reward=1.0).repeats == 1
    assert said(rewarded_episodes(view, min_reward=1.0, per_task=2).sequences) == [[2], [3], [9]]


def test_the_best_is_paired_with_the_worst_and_each_episode_once(record, view):
    record("a", *((reward, (sequence([10 + i]),)) for i, reward in enumerate([0.0, 1.0, 0.4, 0.0, 1.0])))
    record("b", (1.0, (sequence([1]),)), (1.0, (sequence([2]),)))  # no signal
    pairs = preference_pairs(view)
    assert [(p.chosen_reward, p.rejected_reward) for p in pairs] == [(1.0, 0.0), (1.0, 0.0)]
    used = [token for p in pairs for token in (*p.chosen_ids.tolist(), *p.rejected_ids.tolist())]
    assert len(used) == len(set(used))
    assert len(preference_pairs(view, per_group=1)) == 1
    with pytest.raises(TaskError, match="differ in reward by 2 from another"):
        preference_pairs(view, min_gap=2.0)


def test_a_pair_keeps_tokens_and_masks_as_they_were_sampled(record, view):
    record("a", (1.0, (sequence([1, 2], [3]),)), (0.0, (sequence([4]),)))
    (pair,) = preference_pairs(view)
    assert pair.prompt_ids.tolist() == PROMPT
    assert pair.chosen_ids.tolist() == [1, 2, *TOOL, 3]
    assert pair.chosen_mask.tolist() == [True, True, False, False, True]
    assert (pair.rejected_ids.tolist(), pair.rejected_mask.tolist()) == ([4], [True])


@pytest.mark.parametrize(
    "other",
    [
        (sequence([4], prompt=[7, 8]),),  # another prompt
        (sequence([1, 2]),),  # the same tokens
        (sequence([4]), sequence([5])),  # no single completion
        (),
    ],
)
def test_episodes_that_are_no_two_ways_on_from_one_prompt_are_not_paired(record, view, other):
    record("a", (1.0, (sequence([1, 2]),)), (0.0, other))
    with pytest.raises(TaskError, match="none of the 2 training episodes"):
        preference_pairs(view)


def test_what_was_pruned_is_said(record, view):
    buffer = record("a", (1.0, (sequence([1]),)), (0.0, (sequence([2]),)))
    buffer.consume(1, {"g0": ["g0.00.0", "g0.01.0"]})
    buffer.prune(1)
    with pytest.raises(TaskError, match=r"1 were pruned \(rollout.keep_steps\)"):
        rewarded_episodes(view, min_reward=1.0)
    with pytest.raises(TaskError, match=r"2 were pruned"):
        preference_pairs(view)


def test_a_reward_that_none_has_names_the_best(record, view):
    record("a", (0.4, (sequence([1]),)), (0.0, (sequence([2]),)))
    with pytest.raises(TaskError, match=r"none of the 2 training .* has a reward of 1; the best reward is 0.4"):
        rewarded_episodes(view, min_reward=1.0)
