"""The vector environment: sub-environments step independently, and nothing of one reaches another."""

import asyncio
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

import sparring  # noqa: F401  # registers the ids
from sparring.envs import ToolBox
from sparring.envs.hermes import format_call, message_text
from sparring.envs.key_lookup import KeyLookup
from sparring.envs.vector import ChatVectorEnv
from sparring.errors import ConfigError


class Gated(KeyLookup):
    """A key look-up with tools that wait until the test lets them, and one that breaks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = asyncio.Event()
        self.toolbox = ToolBox([self.lookup, self.wait, self.bug])

    async def wait(self) -> str:
        """Wait for the gate."""
        await self.gate.wait()
        return "open"

    async def bug(self) -> str:
        """Break."""
        raise ZeroDivisionError


WAIT, BUG = format_call("wait", {}), format_call("bug", {})


@pytest.fixture
def vector():
    vector = ChatVectorEnv(Gated, num_envs=3)
    vector.reset(seed=0)
    yield vector
    vector.close()


def open_gate(env):
    from sparring.envs.loop import private_loop

    private_loop().call_soon_threadsafe(env.gate.set)


def gold(env):
    return [message_text(message) for message in env.demonstration() if message.role == "assistant"]


def test_make_vec_gives_it_for_every_id():
    vector = gymnasium.make_vec("sparring/KeyLookup-v0", num_envs=2, length=2)
    assert isinstance(vector, ChatVectorEnv)
    assert vector.envs[1].length == 2
    observations, infos = vector.reset(seed=5)
    assert observations in vector.observation_space
    assert list(infos["task_id"]) == [env.task_id for env in vector.envs]
    vector.close()


def test_an_integer_seed_gives_each_its_own_as_in_gymnasium():
    ours = ChatVectorEnv(KeyLookup, num_envs=3).reset(seed=5)[0]
    theirs = gymnasium.vector.SyncVectorEnv([KeyLookup] * 3).reset(seed=5)[0]
    assert ours == theirs
    assert ChatVectorEnv(KeyLookup, num_envs=3).reset(seed=[7, 7, 7])[0] == (ours[2],) * 3


def test_a_whole_episode_with_reset_in_the_step_that_ends_it(vector):
    old = [env.task_id for env in vector.envs]
    steps = [gold(env) for env in vector.envs]
    _, rewards, terminated, *_ = vector.step([call for call, _ in steps])
    assert list(rewards) == [0.4] * 3
    assert not terminated.any()
    observations, rewards, terminated, truncated, infos = vector.step([steps[0][1], "wrong", steps[2][1]])
    np.testing.assert_allclose(rewards, [0.6, 0.0, 0.6])
    assert terminated.all()
    assert not truncated.any()
    assert list(infos["task_id"]) == [env.task_id for env in vector.envs] != old
    assert observations[1].startswith("Look up ")
    assert infos["final_info"]["reward_parts"]["exact"].tolist() == [1.0, 0.0, 1.0]


def test_a_fast_episode_does_not_wait_for_a_slow_one(vector):
    vector.send([WAIT, "wrong", WAIT])
    (first,) = vector.recv(timeout_s=5)
    assert (first.env_index, first.terminated) == (1, True)
    vector.send({1: "wrong again"})
    assert [transition.env_index for transition in vector.recv(timeout_s=5)] == [1]
    for env in (vector.envs[0], vector.envs[2]):
        open_gate(env)
    assert sorted(transition.env_index for transition in vector.recv(2, timeout_s=5)) == [0, 2]


def test_nothing_that_was_ready_is_lost_when_waiting_times_out(vector):
    vector.send({0: "wrong", 1: WAIT})
    with pytest.raises(TimeoutError, match="1 of 2 steps were ready"):
        vector.recv(2, timeout_s=0.05)
    open_gate(vector.envs[1])
    assert {transition.env_index for transition in vector.recv(2, timeout_s=5)} == {0, 1}


def test_misuse_is_said(vector):
    with pytest.raises(ValueError, match="send first"):
        vector.recv()
    with pytest.raises(ValueError, match="no sub-environment 3"):
        vector.send({3: "x"})
    vector.send({0: WAIT})
    with pytest.raises(ValueError, match="0 is still stepping"):
        vector.send({0: "x"})
    with pytest.raises(ValueError, match="have not been received"):
        vector.step(["x"] * 3)
    with pytest.raises(ConfigError, match="num_envs"):
        ChatVectorEnv(KeyLookup, num_envs=0)
    with pytest.raises(ConfigError, match="2 seeds for 3"):
        vector.reset(seed=[1, 2])


def test_a_reset_gives_up_what_is_in_flight(vector):
    vector.send([WAIT] * 3)
    observations, _ = vector.reset(seed=0)
    assert all(observation.startswith("Look up ") for observation in observations)
    with pytest.raises(ValueError, match="0 are in flight"):
        vector.recv()
    assert [len(env.messages) for env in vector.envs] == [1, 1, 1]


def test_a_bug_in_one_sub_environment_raises_with_its_index_and_spares_the_others(vector):
    vector.send(["wrong", "wrong", BUG])
    with pytest.raises(ZeroDivisionError) as caught:
        vector.recv(3, timeout_s=5)
    assert caught.value.__notes__ == ["raised in sub-environment 2"]
    assert {transition.env_index for transition in vector.recv(2, timeout_s=5)} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "del vector; import gc; gc.collect()", "vector.close(); vector.close()"])
def test_a_program_that_leaves_it_open_ends(ending):
    program = (
        "import sparring, gymnasium\nvector = gymnasium.make_vec('sparring/KeyLookup-v0', num_envs=2)\n"
        f"vector.reset(seed=0); vector.send(['a', 'b'])\n{ending}"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_rendering_gives_one_frame_a_sub_environment():
    vector = ChatVectorEnv(KeyLookup, num_envs=2, render_mode="ansi")
    vector.reset(seed=0)
    assert all("Look up" in frame for frame in vector.render())
