"""`Tau2Env` as an environment: Gymnasium's contract, isolation, what the agent may see, and how conversations end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

pytest.importorskip("tau2", reason="needs the extra tau2")

import sparring  # noqa: F401  # registers the environments
from sparring.envs.hermes import message_text
from sparring.envs.tau2 import GoldAgent, ScriptedUser, Tau2Env, UserSide
from sparring.envs.tau2.results import read_results, rescore, results, simulation, write_results
from sparring.envs.tau2.transcript import Entry, calls
from sparring.errors import ConfigError, EngineError, TaskError
from sparring.types import Message, StopReason, ToolCall

DOMAINS = ("airline", "retail", "telecom", "mock")
CREATE = Message(
    "assistant",
    tool_calls=(ToolCall("c", "create_task", '{"user_id": "user_1", "title": "Important Meeting"}'),),
)


async def started(domain: str = "mock", task: int = 0, **kwargs: Any) -> Tau2Env:
    env = Tau2Env(domain=domain, **kwargs)
    await env.areset(seed=0, options={"task_id": env.task_ids("base")[task]})
    return env


async def play_gold(env: Tau2Env) -> dict[str, Any]:
    agent, info = GoldAgent(env.task, solo=env.domain.solo), {}
    while not env.done:
        *_, info = await env.astep(agent.next_message())
    return info


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
def test_gymnasiums_checker_passes(domain: str) -> None:
    check_env(gymnasium.make(f"sparring/Tau2-{domain}-v0").unwrapped, skip_render_check=True)


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_vector_environments_play_side_by_side(mode: str) -> None:
    envs = gymnasium.make_vec("sparring/Tau2-retail-v0", num_envs=3, vectorization_mode=mode)
    observations, _ = envs.reset(seed=0)
    assert len(set(observations)) > 1
    _, rewards, terminated, truncated, _ = envs.step(["Hello."] * 3)
    assert not rewards.any()
    assert not terminated.any()
    assert not truncated.any()
    envs.close()


@pytest.mark.slow
def test_processes_play_side_by_side() -> None:
    make = [lambda: gymnasium.make("sparring/Tau2-mock-v0", disable_env_checker=True)] * 2
    envs = gymnasium.vector.AsyncVectorEnv(make, shared_memory=False)
    envs.reset(seed=0)
    assert not envs.step(["Hello.", "Hello."])[1].any()
    envs.close()


@pytest.mark.slow
def test_importing_the_environments_does_not_import_tau2() -> None:
    code = "import sys, sparring, sparring.envs.tau2; raise SystemExit('tau2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
async def test_the_same_seed_and_actions_give_the_same_episode(domain: str) -> None:
    async def episode() -> list[Any]:
        env = Tau2Env(domain=domain)
        steps: list[Any] = [await env.areset(seed=7)]
        agent = GoldAgent(env.task)
        while not env.done:
            steps.append(await env.astep(agent.next_message()))
        return steps

    assert await episode() == await episode()


async def test_ids_that_upstream_draws_at_random_repeat_and_differ_between_seeds() -> None:
    async def bills(seed: int) -> str:
        env = Tau2Env(domain="telecom")
        await env.areset(seed=seed, options={"task_id": env.task_ids("base")[0]})
        customer = env.world.environment.tools.db.customers[1]  # has no draft of the next bill yet
        call = {"customer_id": customer.customer_id, "line_id": customer.line_ids[0], "gb_amount": 1.0}
        env.world.respond("refuel_data", call)
        return env.world.respond("get_customer_by_id", {"customer_id": customer.customer_id})[0]

    assert await bills(1) == await bills(1)
    assert await bills(1) != await bills(2)


async def test_two_episodes_never_see_each_others_database() -> None:
    one, other = await started("retail"), await started("retail")
    order = next(key for key, order in one.world.environment.tools.db.orders.items() if order.status == "pending")
    arguments = {"order_id": order, "reason": "no longer needed"}
    before, _ = other.world.respond("get_order_details", {"order_id": order})
    changed, error = one.world.respond("cancel_pending_order", arguments)
    assert not error
    assert json.loads(changed)["status"] == "cancelled"
    assert other.world.respond("get_order_details", {"order_id": order}) == (before, False)
    assert (await started("retail")).world.respond("get_order_details", {"order_id": order}) == (before, False)


async def test_a_phone_that_one_user_breaks_stays_whole_for_the_next() -> None:
    """Upstream keeps telecom's VPN profile on a class and changes it there: its later episodes have a broken one."""
    one, other = await started("telecom"), await started("telecom")
    one.world.environment.user_tools.break_vpn()
    for env, performance in ((one, "poor"), (other, "excellent")):
        tools = env.world.environment.user_tools
        tools.disconnect_vpn()
        tools.connect_vpn()
        assert tools.db.device.vpn_details.server_performance.value == performance


async def test_nothing_of_the_gold_answer_is_seen_before_the_end() -> None:
    env = Tau2Env(domain="retail")
    task_id = next(
        i for i in env.task_ids("base") if env.domain.task(i[5:]).evaluation_criteria.communicate_info
    )
    observation, info = await env.areset(seed=0, options={"task_id": task_id})
    criteria = env.task.evaluation_criteria
    steps = [(observation, info)]
    agent = GoldAgent(env.task)
    while not env.done:
        message = agent.next_message()
        before = json.dumps([(text, {**seen, "tools": ""}) for text, seen in steps])
        assert "evaluation_criteria" not in before
        assert "action_id" not in before
        assert "tau2" not in info
        observation, _, _, _, info = await env.astep(message)
        steps.append((observation, info))
    assert info["tau2"]["actions"] == [True] * len(criteria.actions)
    assert info["tau2"]["reward_basis"] == ["COMMUNICATE", "DB"]
    assert info["reward_parts"] == {"ACTION": 1.0, "COMMUNICATE": 1.0, "DB": 1.0}
    assert not any(action.action_id in json.dumps(info) for action in criteria.actions)


async def test_an_empty_message_ends_the_conversation_with_nothing() -> None:
    env = await started()
    _, reward, terminated, truncated, info = await env.astep(" \n")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["tau2"]["termination_reason"] == "agent_error"


@pytest.mark.parametrize("arguments", ["{", "[]", "null", '"x"', "[" * 100_000])
async def test_a_call_whose_arguments_are_no_object_costs_a_turn_and_an_error(arguments: str) -> None:
    env = await started()
    observation, *_ = await env.astep(Message("assistant", tool_calls=(ToolCall("c", "create_task", arguments),)))
    assert observation.startswith("Error: the arguments of 'create_task'")
    assert (env.errors, env.done) == (1, False)
    await env.astep(CREATE)
    assert env.entries[-1].content is not None
    assert not env.entries[-1].error


async def test_a_malformed_call_in_raw_text_comes_back_and_counts_as_an_error() -> None:
    env = await started()
    observation, *_ = await env.astep('<tool_call>{"name": "create_task", "arguments": </tool_call>')
    assert observation.startswith("Malformed tool call")
    assert env.errors == 1
    assert not env.done


async def test_a_tower_of_powers_is_an_error_at_once() -> None:
    env = await started("retail")
    call = ToolCall("c", "calculate", '{"expression": "9**9**9**9"}')
    observation, *_ = await asyncio.wait_for(env.astep(Message("assistant", tool_calls=(call,))), 5)
    assert observation == "Error: int too large to convert to float"


async def test_a_user_who_fails_is_a_failure_and_no_reward() -> None:
    async def user(side: UserSide) -> Entry:
        if len(side.messages) > 1:
            raise EngineError("the user simulator failed")
        return Entry("user", "Hello.")

    env = await started(user=user)
    _, reward, terminated, truncated, info = await env.astep("Hello, who are you?")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["failure"]["kind"] == "engine"
    assert env.stop_reason is StopReason.FAILED


async def test_the_step_budget_truncates_and_the_error_budget_loses() -> None:
    env = await started(max_steps=3)
    *_, terminated, truncated, info = await env.astep(CREATE)
    assert (terminated, truncated, info["truncation_reason"]) == (False, True, "max_turns")
    assert info["tau2"]["termination_reason"] == "max_steps"
    env = await started(max_errors=1)
    *_, terminated, truncated, info = await env.astep(Message("assistant", tool_calls=(ToolCall("c", "x", "{}"),)))
    assert (terminated, truncated) == (True, False)
    assert info["tau2"]["termination_reason"] == "too_many_errors"


async def test_a_budget_from_outside_scores_nothing() -> None:
    env = await started()
    await env.astep(CREATE)
    env.truncate(StopReason.MAX_TOKENS)
    assert env.reward == 0.0
    assert env.report()["termination_reason"] == "max_steps"


async def test_the_protocol_can_be_enforced() -> None:
    env = await started(enforce_protocol=True)
    *_, info = await env.astep(Message("assistant", "I will do it.", CREATE.tool_calls))
    assert info["tau2"]["termination_reason"] == "agent_error"


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["mock", "telecom"])
async def test_solo_the_agent_works_on_the_ticket_and_ends_by_done(domain: str) -> None:
    env = await started(domain, solo=True)
    assert [message.role for message in env.messages] == ["system"]
    assert env.task.ticket in (env.messages[0].content or "")
    assert "done" in {tool["function"]["name"] for tool in env.tools}
    info = await play_gold(env)
    assert env.reward == 1.0
    assert info["tau2"]["termination_reason"] == "agent_stop"


@pytest.mark.slow
async def test_solo_gold_solves_all_of_telecom() -> None:
    env = Tau2Env(domain="telecom", solo=True)
    for task_id in env.task_ids("base"):
        await env.areset(seed=0, options={"task_id": task_id})
        await play_gold(env)
        assert env.reward == 1.0, task_id


async def test_solo_a_text_is_an_error_and_done_beside_a_call_runs_nothing() -> None:
    env = await started(solo=True)
    *_, info = await env.astep("Hello.")
    assert info["tau2"]["termination_reason"] == "agent_error"
    env = await started(solo=True)
    done = ToolCall("d", "done", "{}")
    *_, info = await env.astep(Message("assistant", tool_calls=(*CREATE.tool_calls, done)))
    assert info["tau2"]["termination_reason"] == "agent_stop"
    assert env.reward == 0.0


async def test_histories_are_seen_by_the_agent_and_set_the_state() -> None:
    env = Tau2Env(domain="mock")
    await env.areset(seed=0, options={"task_id": "base/update_task_with_message_history"})
    assert [message.role for message in env.messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert "task_2" in env.world.environment.tools.db.tasks
    await play_gold(env)
    assert env.reward == 1.0


async def test_shaping_pays_gold_actions_as_they_are_taken() -> None:
    env = await started(shaping=0.5)
    _, reward, *_ = await env.astep(CREATE)
    assert reward == 0.5
    await play_gold(env)
    assert env.reward == 0.5  # the task was then created twice
    env = await started(shaping=0.5)
    await play_gold(env)
    assert env.reward == 1.0
    assert env.turn_rewards[0] == 0.5


@pytest.mark.parametrize("domain", DOMAINS)
async def test_demonstrations_are_what_the_gold_agent_lives_through(domain: str) -> None:
    env = await started(domain, 1)
    demonstration = env.demonstration()
    assert demonstration is not None
    opening = len(env.messages)
    await play_gold(env)
    lived = [(message.role, message.content) for message in env.messages[opening:]]
    assert lived == [(message.role, message.content) for message in demonstration]


@pytest.mark.slow
async def test_256_conversations_at_once_add_no_thread() -> None:
    ids = Tau2Env(domain="retail").task_ids("base")

    async def play(number: int) -> float:
        env = Tau2Env(domain="retail")
        await env.areset(seed=number, options={"task_id": ids[number % len(ids)]})
        agent = GoldAgent(env.task)
        while not env.done:
            await asyncio.sleep(0)
            await env.astep(agent.next_message())
        return env.reward

    threads = threading.active_count()
    assert await asyncio.gather(*map(play, range(256))) == [1.0] * 256
    assert threading.active_count() == threads


async def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="no τ²-bench domain 'banking'"):
        Tau2Env(domain="banking")
    with pytest.raises(ConfigError, match="does not support solo mode"):
        Tau2Env(domain="airline", solo=True)
    with pytest.raises(ConfigError, match="max_steps and max_errors"):
        Tau2Env(domain="mock", max_steps=0)
    with pytest.raises(ConfigError, match="shaping"):
        Tau2Env(domain="mock", shaping=2)
    with pytest.raises(ConfigError, match="user is 'scripted'"):
        Tau2Env(domain="mock", user="human")
    with pytest.raises(TaskError, match="nearest"):
        await Tau2Env(domain="mock").areset(options={"task_id": "base/create_task"})
    with pytest.raises(TaskError, match="no split 'dev'"):
        Tau2Env(domain="mock").task_ids("dev")


async def test_tasks_that_need_a_judge_are_refused_without_and_scored_with_one() -> None:
    async def judge(entries: Any, assertions: Any) -> list[bool]:
        return ["Meeting" in assertions[0] for _ in assertions]

    env = Tau2Env(domain="mock")
    original = env.domain.task("create_task_1")
    criteria = original.evaluation_criteria.model_copy(update={"reward_basis": ["DB", "NL_ASSERTION"]})
    judged = original.model_copy(update={"evaluation_criteria": criteria})
    env.domain = env.domain.with_task(judged)
    with pytest.raises(TaskError, match="pass a judge"):
        await env.areset(options={"task_id": "base/create_task_1"})
    env = Tau2Env(domain="mock", judge=judge)
    env.domain = env.domain.with_task(judged)
    await env.areset(options={"task_id": "base/create_task_1"})
    await play_gold(env)
    assert env.reward_parts["DB"] == 1.0
    assert env.reward_parts["NL_ASSERTION"] == 0.0
    assert env.reward == 0.0


def test_the_scripted_user_uses_the_tools_that_the_agent_names() -> None:
    env = Tau2Env(domain="telecom")
    task = env.domain.task(env.task_ids("base")[0].partition("/")[2])

    def ask(text: str) -> Entry:
        heard = [Message("user", "Hi!"), Message("assistant", "My phone is broken."), Message("user", text)]
        return ScriptedUser().answer(UserSide(task, "", heard, env.domain.user_tools, 0))

    assert [call.name for call in ask("Please check the status: check_status_bar").calls] == ["check_status_bar"]
    assert [call.name for call in ask("Could you run speed test now?").calls] == ["run_speed_test"]
    assert ask("What is the matter?").calls == ()
    assert ask("You are being transferred to a human agent.").content == "###TRANSFER###"


async def test_calls_run_in_another_order_are_entered_as_they_ran(tmp_path: Path) -> None:
    """An SDK may run the calls of one message side by side; upstream replays them in the order of the message."""
    env = await started()
    done = ToolCall("b", "update_task_status", '{"task_id": "task_2", "status": "completed"}')
    await env.observe(Message("assistant", None, (done, *CREATE.tool_calls)))
    await env.call_tool("create_task", CREATE.tool_calls[0].arguments)
    await env.call_tool(done.name, done.arguments)
    await env.finish("Done.")
    await env.finish("Done.")
    assert [call.name for call in calls(env.entries)] == ["create_task", "update_task_status"]
    assert replayed(env, tmp_path) == env.verdict


async def test_calls_that_an_agent_drops_leave_no_trace(tmp_path: Path) -> None:
    env = await started()
    both = (CREATE.tool_calls[0], ToolCall("x", "create_task", '{"user_id": "user_1", "title": "Dropped"}'))
    await env.observe(Message("assistant", None, both))
    await env.call_tool("create_task", both[0].arguments)
    await env.astep("Done.")
    await env.astep("Done.")
    assert env.reward == 1.0
    assert replayed(env, tmp_path) == env.verdict


async def test_calls_that_no_message_announced_are_entered(tmp_path: Path) -> None:
    env = await started()
    await env.call_tool("create_task", CREATE.tool_calls[0].arguments)
    await env.call_tool("get_users", {})
    await env.astep("Done.")
    await env.astep("Done.")
    assert [len(entry.calls) for entry in env.entries if entry.role == "assistant"] == [0, 1, 1, 0, 0]
    assert replayed(env, tmp_path) == env.verdict


@pytest.mark.parametrize("route", ["raw", "structured"])
async def test_a_malformed_call_spoils_its_message_however_it_comes(route: str) -> None:
    broken = '<tool_call>{"name": "create_task"'
    good = message_text(CREATE)
    env = await started()
    if route == "raw":
        await env.astep(f"{good}\n{broken}")
    else:
        await env.astep(Message("assistant", broken, CREATE.tool_calls))
    assert (env.errors, env.steps, env.turns) == (1, 2, 1)
    assert list(calls(env.entries)) == []
    assert "task_2" not in env.world.environment.tools.db.tasks


async def test_ten_malformed_calls_are_too_many() -> None:
    env = await started()
    while not env.done:
        await env.astep("<tool_call>{</tool_call>")
    assert (env.termination, env.errors) == ("too_many_errors", 10)


def replayed(env: Tau2Env, folder: Path) -> Any:
    """The verdict on the episode as written to a results file and scored again."""
    run = simulation(env, started=datetime.now(), finished=datetime.now())
    nobody = {"implementation": "test", "llm": None, "llm_args": None}
    info = {"num_trials": 1, "max_steps": 200, "max_errors": 10, "seed": 0, "agent": nobody, "user": nobody}
    write_results(folder / "results.json", results(env.domain, [run], **info))
    (verdict,) = rescore(read_results(folder / "results.json"))
    return verdict
