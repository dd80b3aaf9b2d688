"""Every registered id is a Gymnasium environment in every way that Gymnasium makes one."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import sparring  # noqa: F401  # registers the ids
from sparring.envs import ChatEnv

ROOT = Path(__file__).parents[3]
IDS = ["sparring/Calculator-v0", "sparring/GSM8K-v0", "sparring/KeyLookup-v0"]
ACTIONS = ['<tool_call>{"name": "nothing", "arguments": {}}</tool_call>', "Answer: 3"]

pytestmark = pytest.mark.usefixtures("sparring_data_env")


def test_these_are_the_registered_ids_of_this_room():
    here = {spec.id for spec in gymnasium.registry.values() if str(spec.entry_point).startswith("sparring.envs.")}
    assert set(IDS) <= here


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_checker_passes_without_a_warning(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(env_id).unwrapped)


@pytest.mark.parametrize("env_id", IDS)
def test_gym_make_keeps_a_spec_that_survives_json(env_id):
    env = gymnasium.make(env_id, split="test", max_turns=3)
    again = gymnasium.make(gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.unwrapped.split == "test"
    assert again.unwrapped.max_turns == 3


@pytest.mark.parametrize("env_id", IDS)
def test_gym_make_imports_the_package_by_the_ids_prefix(env_id):
    assert isinstance(gymnasium.make(f"sparring:{env_id}").unwrapped, ChatEnv)


@pytest.mark.parametrize("env_id", IDS)
def test_one_seed_and_the_same_actions_give_the_same_episode(env_id):
    def play():
        env = gymnasium.make(env_id).unwrapped
        return [env.reset(seed=7), *(env.step(action) for action in ACTIONS)]

    assert play() == play()


@pytest.mark.parametrize("env_id", IDS)
def test_different_seeds_draw_different_tasks(env_id):
    env = gymnasium.make(env_id).unwrapped
    drawn = {env.reset(seed=seed)[1]["task_id"] for seed in range(20)}
    assert len(drawn) > 1


@pytest.mark.parametrize("env_id", IDS)
def test_what_reset_and_step_return_is_json(env_id):
    env = gymnasium.make(env_id).unwrapped
    for returned in (env.reset(seed=0), *(env.step(action) for action in ACTIONS)):
        assert json.loads(json.dumps(returned)) == list(returned)


@pytest.mark.parametrize("env_id", IDS)
def test_the_gold_answer_stays_out_of_reset_and_out_of_every_step_before_the_end(env_id):
    env = gymnasium.make(env_id).unwrapped
    told_apart = 0
    for number in range(len(env.task_ids("train"))) if env_id == "sparring/GSM8K-v0" else range(50):
        reset = env.reset(options={"task_id": f"train/{number}"})
        gold = env.demonstration()[-1].content.replace("Answer: ", "")
        step = env.step(ACTIONS[0])
        question = reset[1]["messages"][-1]["content"]
        if gold not in question:  # an answer may happen to be one of the numbers of its question
            told_apart += 1
            assert gold not in json.dumps(step)
        assert "reward_parts" not in step[4]
    assert told_apart


@pytest.mark.parametrize("env_id", IDS)
def test_demonstrations_earn_the_whole_reward(env_id):
    env = gymnasium.make(env_id).unwrapped
    for task_id in env.task_ids("test")[:20]:
        env.reset(options={"task_id": task_id})
        actions = [message for message in env.demonstration() if message.role == "assistant"]
        *_, (_, _, terminated, truncated, info) = [env.step(action) for action in actions]
        assert (terminated, truncated, env.reward) == (True, False, 1.0)
        assert info["reward_parts"]["exact"] == 1.0
        assert sum(env.turn_rewards) == pytest.approx(1.0)


@pytest.mark.parametrize("env_id", IDS)
def test_a_sync_vector_environment_sees_what_one_environment_sees(env_id):
    vector = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env_id)] * 2)
    alone = gymnasium.make(env_id).unwrapped
    observations, _ = vector.reset(seed=[3, 4])
    assert observations == (alone.reset(seed=3)[0], alone.reset(seed=4)[0])
    observations, *_ = vector.step([ACTIONS[0]] * 2)
    assert observations == (alone.step(ACTIONS[0])[0],) * 2
    vector.close()


@pytest.mark.slow
@pytest.mark.parametrize("env_id", IDS)
def test_an_async_vector_environment_sees_what_one_environment_sees(env_id):
    vector = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make(env_id)] * 2, shared_memory=False)
    alone = gymnasium.make(env_id).unwrapped
    try:
        observations, _ = vector.reset(seed=[3, 4])
        assert observations == (alone.reset(seed=3)[0], alone.reset(seed=4)[0])
        observations, _, terminated, *_ = vector.step([ACTIONS[1]] * 2)
        assert list(terminated) == [True, True]
    finally:
        vector.close()


def test_shared_memory_is_refused_rather_than_silently_wrong():
    with pytest.raises(ValueError, match="shared_memory"):
        gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("sparring/KeyLookup-v0")], shared_memory=True)


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(gymnasium.error.NameNotFound, match="Calculator"):
        gymnasium.make("sparring/Calculater-v0")


@pytest.mark.slow
def test_importing_the_environments_is_light():
    """Beside Gymnasium, which they need, in processor time of fresh interpreters: little more than that alone takes."""
    code = (
        "import sys, time; start = time.process_time(); import gymnasium; alone = time.process_time() - start;"
        "import sparring.envs; print((time.process_time() - start) / alone, 'torch' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(5)
    ]
    assert {run.split()[1] for run in runs} == {"False"}
    assert min(float(run.split()[0]) for run in runs) < 1.6
