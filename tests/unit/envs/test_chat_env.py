"""ChatEnv's rules: turns, budgets, the three primitives, failures, and how an episode ends."""

import asyncio
import gc
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest
from gymnasium.error import ResetNeeded

from sparring.envs import ChatEnv, ChatText, ToolBox
from sparring.envs.hermes import format_call
from sparring.envs.loop import private_loop, spawn
from sparring.envs.tasks import TaskRange
from sparring.errors import ConfigError, SandboxError, TaskError
from sparring.types import Message, StopReason, ToolCall


class Echo(ChatEnv):
    """Repeats; pays 0.25 for each echo, 1 for handing in "done"; answers any other text with a question."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.toolbox = ToolBox([self.echo, self.slow, self.crash, self.bug])
        self.gate = asyncio.Event()
        self.closed = 0

    def task_ids(self, split: str = "train") -> Sequence[str]:
        return TaskRange(split, 5 if split == "train" else 0)

    async def _begin(self, task_id):
        return [Message("system", "Be brief."), Message("user", f"Task {task_id}")]

    async def _submit(self, answer):
        if answer != "done":
            return f"{answer}?"
        self.reward += 1.0
        return None

    async def _close(self):
        self.closed += 1

    async def echo(self, text: str) -> str:
        """Repeat."""
        self.reward += 0.25
        return text

    async def slow(self) -> str:
        """Wait for the gate."""
        await self.gate.wait()
        return "slow"

    async def crash(self) -> str:
        """Fail as infrastructure does."""
        raise SandboxError("the container is gone")

    async def bug(self) -> str:
        """Fail as a bug does."""
        raise ZeroDivisionError("oops")


def calls(*names_and_arguments):
    made = [ToolCall(f"id_{i}", name, arguments) for i, (name, arguments) in enumerate(names_and_arguments)]
    return Message("assistant", tool_calls=tuple(made))


ECHO = format_call("echo", {"text": "a"})


async def started(**kwargs):
    env = Echo(**kwargs)
    await env.areset(seed=0)
    return env


async def test_reset_returns_the_text_of_its_messages_and_what_a_policy_needs():
    env = Echo()
    observation, info = await env.areset(seed=0, options={"task_id": "train/3"})
    assert observation == "Task train/3"
    assert (info["task_id"], info["split"], info["system"]) == ("train/3", "train", "Be brief.")
    assert info["messages"] == [message.to_openai() for message in env.messages]
    assert '"name": "echo"' in info["tools"]


async def test_options_beat_the_constructor_which_beats_the_seed():
    env = Echo(task_id="train/1")
    assert (await env.areset(seed=0, options={"task_id": "train/2"}))[1]["task_id"] == "train/2"
    assert (await env.areset(seed=0))[1]["task_id"] == "train/1"
    drawn = [(await Echo().areset(seed=seed))[1]["task_id"] for seed in range(30)]
    assert set(drawn) == set(TaskRange("train", 5))


async def test_an_unknown_task_names_the_nearest_ones():
    with pytest.raises(TaskError, match=r"no task 'tain/3'; the nearest are train/3"):
        await Echo().areset(options={"task_id": "tain/3"})
    for wrong in ("train/5", "train/03", "train/-1", "train", 3, ""):
        with pytest.raises(TaskError, match="train/"):
            await Echo().areset(options={"task_id": wrong})


async def test_a_reset_that_fails_leaves_no_running_episode():
    env = await started()
    with pytest.raises(TaskError):
        await env.areset(options={"task_id": "train/99"})
    with pytest.raises(ResetNeeded):
        await env.astep("done")


async def test_an_empty_split_and_a_wrong_option_are_clear_errors():
    with pytest.raises(TaskError, match="'test' of Echo has no tasks"):
        await Echo(split="test").areset(seed=0)
    with pytest.raises(ConfigError, match="no option 'task'; did you mean task_id"):
        await Echo().areset(options={"task": "train/1"})


@pytest.mark.parametrize("wrong", [{"split": "dev"}, {"max_turns": 0}, {"render_mode": "human"}])
def test_wrong_constructor_arguments_are_refused(wrong):
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
        Echo(**wrong)


async def test_a_raw_call_runs_and_its_reward_is_the_steps():
    env = await started()
    observation, reward, terminated, truncated, info = await env.astep(ECHO)
    assert (observation, reward, terminated, truncated) == ("a", 0.25, False, False)
    assert info["messages"] == [{"role": "tool", "content": "a", "tool_call_id": "call_0", "name": "echo"}]
    await env.astep(ECHO)
    assert env.messages[-1].tool_call_id == "call_1"


async def test_an_assistant_message_is_kept_as_it_was_given():
    env = await started()
    await env.astep(f"Hm. {ECHO}")
    assert env.messages[-2] == Message("assistant", f"Hm. {ECHO}")
    message = calls(("echo", '{"text":  "b"}'))
    await env.astep(message)
    assert env.messages[-2] is message
    assert env.messages[-1].tool_call_id == "id_0"


async def test_calls_of_one_message_run_in_order_and_are_one_turn():
    env = await started()
    observation, reward, *_ = await env.astep(ECHO + format_call("echo", {"text": "b"}))
    assert (observation, reward, env.turns, env.turn_rewards) == ("a\n\nb", 0.5, 1, [0.5])


async def test_a_malformed_call_costs_a_turn_and_says_what_was_wrong():
    env = await started(max_turns=2)
    observation, reward, terminated, truncated, _ = await env.astep("<tool_call>{")
    assert "Malformed tool call" in observation
    assert (reward, terminated, truncated, env.turns) == (0.0, False, False, 1)
    *_, truncated, info = await env.astep("<tool_call>{")
    assert (truncated, info["truncation_reason"]) == (True, "max_turns")


async def test_malformed_text_beside_parsed_calls_spoils_the_message_on_both_paths():
    text = ECHO + "<tool_call>{"
    raw, structured = await started(), await started()
    await raw.astep(text)
    await structured.astep(Message("assistant", text, tool_calls=(ToolCall("x", "echo", '{"text": "a"}'),)))
    assert raw.reward == structured.reward == 0.0
    assert raw.turns == structured.turns == 1
    assert "Malformed" in structured.messages[-1].content


async def test_finish_gives_an_agent_the_observation_that_a_raw_text_would_have_got():
    raw, adapter = await started(), await started()
    for text in ("<tool_call>{", "what", ECHO, "done"):
        observation, *_ = await raw.astep(text)
        await adapter.observe(Message("assistant", text))
        assert (await adapter.finish(text) or "") == observation
    assert adapter.done
    assert adapter.turn_rewards == raw.turn_rewards == [0.0, 0.0, 0.25, 1.0]


async def test_calls_run_side_by_side_are_one_turn_and_the_turn_ends_with_the_last():
    env = await started(max_turns=1)
    await env.observe(calls(("slow", "{}"), ("echo", '{"text": "a"}')))
    slow = asyncio.create_task(env.call_tool("slow", {}))
    await asyncio.sleep(0)
    await env.call_tool("echo", {"text": "a"})
    assert not env.done
    env.gate.set()
    await slow
    assert (env.stop_reason, env.turn_rewards) == (StopReason.MAX_TURNS, [0.25])
    assert [message.tool_call_id for message in env.messages[-2:]] == ["id_1", "id_0"]


async def test_a_turn_whose_calls_were_never_run_still_counts():
    env = await started(max_turns=2)
    for _ in range(2):
        await env.observe(calls(("echo", "{}")))
    assert not env.done
    await env.observe(Message("assistant", "one too many"))
    assert env.stop_reason is StopReason.MAX_TURNS
    assert env.messages[-1].content is None  # the one too many was not entered


async def test_a_truncated_episode_keeps_the_reward_it_had():
    env = await started()
    await env.astep(ECHO)
    await env.observe(calls(("echo", "{}")))
    env.truncate(StopReason.MAX_TOKENS)
    env.truncate(StopReason.MAX_TURNS)
    assert (env.stop_reason, env.reward, env.turn_rewards) == (StopReason.MAX_TOKENS, 0.25, [0.25, 0.0])


async def test_after_the_end_the_primitives_do_nothing_and_a_step_raises():
    env = await started()
    await env.astep("done")
    before = list(env.messages)
    await env.observe(Message("assistant", "more"))
    assert await env.call_tool("echo", {"text": "a"}) == "The episode is over."
    assert await env.finish("done") is None
    assert (env.messages, env.reward) == (before, 1.0)
    with pytest.raises(ResetNeeded, match="no running episode"):
        await env.astep("done")


async def test_a_step_before_reset_raises():
    with pytest.raises(ResetNeeded):
        await Echo().astep("done")


@pytest.mark.parametrize("wrong", [None, 3, Message("user", "hello"), {"role": "assistant"}])
async def test_an_action_that_is_no_assistant_message_is_refused(wrong):
    env = await started()
    with pytest.raises(TypeError, match="assistant Message"):
        await env.astep(wrong)
    assert env.turns == 0


async def test_an_infrastructure_failure_ends_the_episode_as_truncated_with_the_failure():
    env = await started()
    _, reward, terminated, truncated, info = await env.astep(format_call("crash", {}))
    assert (reward, terminated, truncated, info["truncation_reason"]) == (0.0, False, True, "failed")
    assert info["failure"]["kind"] == "sandbox"
    assert "the container is gone" in info["failure"]["message"]


async def test_an_infrastructure_failure_reaches_an_adapter_and_stays_noted():
    env = await started()
    await env.observe(calls(("crash", "{}")))
    with pytest.raises(SandboxError):
        await env.call_tool("crash", {})
    assert (env.done, env.failure.kind, env.stop_reason) == (True, "sandbox", StopReason.FAILED)


async def test_a_bug_raises_and_is_noted_as_internal():
    env = await started()
    with pytest.raises(ZeroDivisionError):
        await env.astep(format_call("bug", {}))
    assert (env.done, env.failure.kind) == (True, "internal")


async def test_infos_share_no_object_with_the_environment_or_each_other():
    env = await started()
    info = (await env.astep(ECHO))[4]
    info["messages"][0]["content"] = "changed"
    assert env.messages[-1].content == "a"
    last = (await env.astep("done"))[4]
    last["reward_parts"]["x"] = 1.0
    assert env.reward_parts == {}


async def test_close_is_idempotent_and_a_new_episode_closes_the_old():
    env = await started()
    await env.areset()
    assert env.closed == 1
    await env.aclose()
    await env.aclose()
    assert env.closed == 2
    with pytest.raises(ResetNeeded):
        await env.astep("done")


def test_a_forgotten_environment_is_closed_when_it_is_collected():
    closed = []

    class Held(Echo):
        async def _close(self):
            closed.append(self.task_id)

    env = Held()
    env.reset(seed=0)
    del env
    gc.collect()
    spawn(asyncio.sleep(0)).result(timeout=5)  # the private loop has run what was handed to it
    spawn(asyncio.sleep(0)).result(timeout=5)
    assert len(closed) == 1


@pytest.mark.slow
def test_an_environment_left_open_is_closed_at_exit(tmp_path):
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from sparring.envs.key_lookup import KeyLookup
        class Held(KeyLookup):
            async def _close(self):
                Path(sys.argv[1]).write_text(self.task_id)
        env = Held(task_id="test/7")
        env.reset()
    """)
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "closed")], check=True, timeout=60)
    assert (tmp_path / "closed").read_text() == "test/7"


async def test_the_synchronous_face_works_inside_a_running_loop():
    env = Echo()
    env.reset(seed=0)
    assert env.step("done")[2] is True
    env.close()


def test_the_synchronous_face_called_on_its_own_loop_says_what_to_do():
    async def reenter():
        Echo().reset()

    with pytest.raises(RuntimeError, match="await areset"):
        spawn(reenter()).result(timeout=5)


def test_all_environments_share_one_private_loop():
    loop = private_loop()
    for _ in range(3):
        Echo().reset(seed=0)
    assert private_loop() is loop


def test_the_text_space():
    space = ChatText(50, messages=True, seed=0)
    assert all(space.sample() in space for _ in range(20))
    assert "" in space
    assert "x" * 51 not in space
    assert Message("assistant", "x") in space
    assert Message("user", "x") not in space
    assert Message("assistant", "x") not in ChatText()
    assert ChatText(50) != ChatText(51)
    assert space == ChatText(50, messages=True)
    assert b"x" not in space


def test_task_ranges_index_and_contain_without_a_list():
    ids = TaskRange("train", 10**12)
    assert len(ids) == 10**12
    assert ids[5] == "train/5"
    assert ids[-1] in ids
    assert ids[2:4] == ["train/2", "train/3"]
    for unknown in ("train/1000000000000", "train/05", "train/٣", "test/1", "train/", "train/" + "9" * 5000, None):
        assert unknown not in ids


@pytest.mark.parametrize("mode", ["ansi", "html"])
async def test_rendering_shows_every_message_and_nothing_raw(mode):
    env = Echo(render_mode=mode)
    await env.areset(seed=0)
    await env.astep("<script>alert(1)</script>\x1b]0;title\x07\u202e")
    shown = env.render()
    assert "Be brief." in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert "\\u202e" in shown
    assert ("<script>" in shown) == (mode == "ansi")
    assert "\x1b]" not in shown


async def test_without_a_render_mode_nothing_is_rendered():
    assert (await started()).render() is None


@pytest.mark.parametrize(
    ("opening", "got"),
    [
        ("a prompt", "got str"),
        (None, "got NoneType"),
        (Message("user", "a prompt"), "got Message"),
        ([{"role": "user", "content": "a prompt"}], "got a sequence that holds a dict"),
        ([{}], "got a sequence that holds a dict"),
    ],
)
async def test_an_opening_that_is_no_messages_says_what_it_should_be(opening, got):
    class Opens(Echo):
        async def _begin(self, task_id):
            return opening

    with pytest.raises(ConfigError, match=rf"Opens\._begin must return Messages, {got}; one prompt is"):
        await Opens().areset(seed=0)


async def test_an_observation_that_is_neither_text_nor_none_says_what_it_should_be():
    class Pays(Echo):
        async def _submit(self, answer):
            return 1.0

    env = Pays()
    await env.areset(seed=0)
    *_, truncated, info = await env.astep("done")
    assert truncated
    assert info["failure"]["kind"] == "config"
    assert "Pays._submit must return None (accepted) or a str" in info["failure"]["message"]
    assert "got float" in info["failure"]["message"]


def test_task_ids_without_a_split_names_the_signature():
    class NoSplit(Echo):
        def task_ids(self):
            return ["train/0"]

    with pytest.raises(ConfigError, match=r"NoSplit.task_ids .*declare it as `def task_ids\(self, split: str"):
        NoSplit()
