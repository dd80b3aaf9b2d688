"""The episode runner: every end of an episode becomes a reward or a failure, and the environment is always closed."""

import asyncio
import inspect
import json

import gymnasium
import pytest

from sparring.agents.native import NativePolicy
from sparring.agents.policy import Outcome
from sparring.agents.runner import make_env, make_runner
from sparring.agents.scripted import ScriptedPolicy
from sparring.envs import ToolBox, ToolError
from sparring.envs.hermes import format_call
from sparring.envs.key_lookup import KeyLookup
from sparring.errors import BudgetExhausted, ConfigError, EngineError, SandboxError, described
from sparring.types import ChatReply, EpisodeSpec, Message, StopReason

ENV_ID = "sparring-tests/Watched-v0"
SPEC = EpisodeSpec("episode-1", "group-1", ENV_ID, "train/0", seed=0)


class Watched(KeyLookup):
    """A key look-up that remembers its closings, and breaks where its tests ask it to."""

    closed = 0

    def __init__(self, *, break_in: str = "", **kwargs):
        super().__init__(**kwargs)
        self.break_in = break_in
        self.toolbox = ToolBox([self.lookup, self.crash, self.bug])

    async def _begin(self, task_id):
        if self.break_in == "reset":
            raise SandboxError("no container")
        if self.break_in == "reset, a bug":
            raise KeyError("x")
        return await super()._begin(task_id)

    async def _close(self):
        Watched.closed += 1
        if self.break_in == "close":
            raise SandboxError("the container does not stop")

    async def crash(self) -> str:
        """Fail as infrastructure does."""
        raise SandboxError("gone")

    async def bug(self) -> str:
        """Fail as a bug does."""
        raise ZeroDivisionError("oops")


gymnasium.register(ENV_ID, entry_point=Watched)


class Replies:
    """A chat client that gives prepared replies, then raises."""

    base_url, api_key = None, "key"

    def __init__(self, *replies, then=None):
        self.replies, self.then, self.seen = list(replies), then, []

    async def chat(self, messages, tools=(), *, agent_id="main", max_new_tokens=None):
        self.seen.append(list(messages))
        if not self.replies:
            raise self.then
        message = self.replies.pop(0)
        return ChatReply(message, message.content or "", "stop")


@pytest.fixture(autouse=True)
def closings():
    Watched.closed = 0


async def play(policy, client=None, *, timeout_s=10.0, max_turns=None, **env_kwargs):
    run = make_runner(ENV_ID, env_kwargs, policy, max_turns=max_turns, timeout_s=timeout_s)
    return await run(SPEC, client)


class Raises:
    def __init__(self, error):
        self.error = error

    async def play(self, env, client):
        raise self.error


class Hangs:
    """Hangs, and on cancellation raises (or, with no error, returns) what some SDKs would."""

    def __init__(self, error=asyncio.CancelledError):
        self.started, self.error = asyncio.Event(), error

    async def play(self, env, client):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.error:
                raise self.error from None
        return Outcome(StopReason.FINISHED)


class Leaves:
    def __init__(self, reason):
        self.reason = reason

    async def play(self, env, client):
        return Outcome(self.reason)


async def test_a_finished_episode_has_the_environments_reward():
    result = await play(ScriptedPolicy())
    assert (result.stop_reason, result.reward, result.failure) == (StopReason.FINISHED, 1.0, None)
    assert result.reward_parts == {"exact": 1.0, "right_call": 1.0}
    assert sum(result.turn_rewards) == pytest.approx(1.0)
    assert Watched.closed == 1


@pytest.mark.parametrize(
    ("policy", "env_kwargs", "kind", "says"),
    [
        (Raises(EngineError("the engine died")), {}, "engine", "the engine died"),
        (Raises(ValueError("a bug in the agent")), {}, "agent", "ValueError: a bug in the agent (test_runner.py:"),
        (Raises(TimeoutError("its own")), {}, "agent", "TimeoutError"),
        (ScriptedPolicy([format_call("crash", {})]), {}, "sandbox", "gone"),
        (ScriptedPolicy([format_call("bug", {})]), {}, "internal", "ZeroDivisionError: oops (test_runner.py:"),
        (ScriptedPolicy([]), {}, "agent", "the script of 0 actions ended"),
        (Leaves(StopReason.FINISHED), {}, "agent", "left the episode open"),
        (ScriptedPolicy(), {"break_in": "reset"}, "sandbox", "no container"),
        (ScriptedPolicy(), {"break_in": "reset, a bug"}, "internal", "KeyError: 'x' (test_runner.py:"),
    ],
)
async def test_a_failure_is_data_with_its_kind_and_no_reward(policy, env_kwargs, kind, says):
    result = await play(policy, **env_kwargs)
    assert (result.stop_reason, result.reward) == (StopReason.FAILED, None)
    assert result.failure.kind == kind
    assert says in result.failure.message
    assert Watched.closed == 1


async def test_wrong_environments_fail_with_what_is_wrong():
    async def failure(env_id, **kwargs):
        return (await make_runner(env_id, kwargs, ScriptedPolicy(), timeout_s=5)(SPEC, None)).failure

    assert "KeyLookup" in (await failure("sparring/KeyLokup-v0")).message
    assert (await failure("CartPole-v1")).kind == "config"
    assert "lenght" in (await failure("sparring/KeyLookup-v0", lenght=3)).message
    with pytest.raises(ConfigError, match="not a sparring"):
        make_env("CartPole-v1", {})


@pytest.mark.parametrize(
    ("env_id", "wrong", "expected"),
    [
        (
            "sparring/KeyLookup-v0",
            "careles",
            "environment 'sparring/KeyLookup-v0' takes no 'careles'; did you mean careless? "
            "It takes length, careless, max_turns, split, task_id, render_mode",
        ),
        (ENV_ID, "brake_in", "did you mean break_in? It takes break_in, length, careless, max_turns, split"),
        ("sparring:sparring/KeyLookup-v0", "qqq", "takes no 'qqq'. It takes length"),
    ],
)
def test_a_misspelt_argument_is_named_with_those_there_are(env_id, wrong, expected):
    with pytest.raises(ConfigError) as caught:
        make_env(env_id, {wrong: 1})
    assert expected in str(caught.value)
    assert "was raised from" not in str(caught.value)


def test_a_type_error_inside_a_constructor_is_told_as_it_is():
    with pytest.raises(ConfigError, match="'<' not supported"):
        make_env("sparring/KeyLookup-v0", {"length": "three"})


async def test_an_unknown_task_is_a_failure_of_kind_task():
    run = make_runner(ENV_ID, {}, ScriptedPolicy(), timeout_s=5)
    result = await run(EpisodeSpec("e", "g", ENV_ID, "train/x", seed=0), None)
    assert result.failure.kind == "task"
    assert "nearest" in result.failure.message


@pytest.mark.parametrize("error", [asyncio.CancelledError, ValueError, None])
async def test_a_wall_clock_deadline_is_a_failure_and_not_a_truncation(error):
    result = await play(Hangs(error), timeout_s=0.05)
    assert (result.stop_reason, result.failure.kind) == (StopReason.DEADLINE, "deadline")
    assert "rollout.episode_timeout_s=0.05" in result.failure.message
    assert Watched.closed == 1


@pytest.mark.parametrize("reason", ["max_turns", "max_tokens"])
async def test_a_budget_that_ran_out_is_a_truncation_with_the_reward_so_far(reason):
    error = BudgetExhausted("used up", stop_reason=reason)
    call = KeyLookup()
    await call.areset(options={"task_id": SPEC.task_id})
    for policy, client in (
        (NativePolicy(), Replies(call.demonstration()[0], then=error)),
        (Raises(error), None),
        (Leaves(StopReason(reason)), None),
    ):
        result = await play(policy, client)
        assert (result.stop_reason, result.failure) == (StopReason(reason), None)
        assert result.reward == (0.4 if client else 0.0)


async def test_the_runs_turn_budget_caps_the_environments():
    script = ScriptedPolicy([format_call("lookup", {"key": "?"})] * 2)
    result = await play(script, max_turns=2)
    assert result.stop_reason is StopReason.MAX_TURNS
    assert (await play(script, max_turns=16)).failure.kind == "agent"  # the environment's own three still hold


async def test_cancelling_the_runner_propagates_and_closes():
    policy = Hangs()
    run = asyncio.create_task(play(policy))
    await policy.started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert Watched.closed == 1


async def test_an_environment_that_does_not_close_spoils_no_result(caplog):
    result = await play(ScriptedPolicy(), break_in="close")
    assert result.reward == 1.0
    assert "did not close" in caplog.text


async def test_the_native_policy_prompts_with_the_environments_messages_and_tools():
    malformed = Message("assistant", "<tool_call>{")
    client = Replies(malformed, Message("assistant", "1"))
    env = KeyLookup()
    await env.areset(seed=0)
    outcome = await NativePolicy().play(env, client)
    assert (outcome.stop_reason, outcome.answer) == (StopReason.FINISHED, "1")
    assert client.seen[1][:2] == [*client.seen[0], malformed]
    assert "Malformed" in client.seen[1][2].content


async def test_tools_may_say_no_and_the_episode_goes_on():
    class Refusing(KeyLookup):
        async def lookup(self, key: str) -> str:
            """Refuse."""
            raise ToolError("not today")

    env = Refusing()
    await env.areset(seed=0)
    assert (await env.astep(format_call("lookup", {"key": "a"})))[0] == "Error: not today"


async def test_a_bug_is_placed_in_its_authors_file_without_the_folder():
    class Careless(Watched):
        async def _submit(self, answer):
            return json.loads("{")  # breaks inside the standard library

    gymnasium.register("sparring-tests/Careless-v0", entry_point=Careless)
    policy = ScriptedPolicy(["an answer"])
    result = await make_runner("sparring-tests/Careless-v0", {}, policy, timeout_s=5)(SPEC, None)
    line = inspect.getsourcelines(Careless._submit)[1] + 1
    assert result.failure.message.endswith(f"(test_runner.py:{line} in _submit)")
    assert "JSONDecodeError: Expecting property name" in result.failure.message


def test_an_error_that_was_never_raised_has_no_place():
    assert described(KeyError("oops")) == "KeyError: 'oops'"
