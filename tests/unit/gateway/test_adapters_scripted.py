"""Adapters against an engine that says what it is told: malformed calls, budgets, programs that misbehave."""

import asyncio
import json
import logging
import os
import signal
import sys
import time

import pytest
from agents import Agent

from sparring.agents.blackbox import BlackBoxPolicy
from sparring.agents.native import NativePolicy
from sparring.agents.openai_agents import OpenAIAgentsPolicy
from sparring.agents.process import run_program
from sparring.agents.runner import make_runner
from sparring.types import EpisodeSpec, StopReason

END = "<|im_end|>"
ENV_ID = "sparring/Calculator-v0"
TASK = "train/3"  # 17 shells and 20 more
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 + 20"}}\n</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "calculater", "arguments": {"expression": "17 + 20"}}\n</tool_call>'
MALFORMED = '<tool_call>\n{"name": "calculator", "argu'
ANSWER = "Answer: 37"
BLACK_BOX = [sys.executable, "examples/blackbox/agent.py"]


@pytest.fixture
def play(serve, open_session):
    async def play_(policy, *texts, turn_budget=20, timeout_s=20.0, **env_kwargs):
        async with serve(*(text + END for text in texts), max_length=20_000) as (_, recorder, _):
            session = open_session(recorder, turn_budget=turn_budget)
            run = make_runner(ENV_ID, env_kwargs, policy, timeout_s=timeout_s)
            result = await run(EpisodeSpec("e", "g", ENV_ID, TASK, 0), session)
            return result, recorder.close_session(session.session_id)

    return play_


AGENTS = {
    "native": NativePolicy(),
    "responses": OpenAIAgentsPolicy(Agent(name="solver")),
    "chat": OpenAIAgentsPolicy(Agent(name="solver"), use_responses=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize(
    "texts",
    [
        (CALL, ANSWER),
        (UNKNOWN, CALL, ANSWER),
        (MALFORMED, CALL, ANSWER),
        (CALL + CALL, ANSWER),
        (CALL + UNKNOWN, ANSWER),
        ("So:\n" + CALL, "<think>\nHm.\n</think>\n\n" + ANSWER),
        ("I do not know.",),
        ("So it is. " * 40, CALL, ANSWER),  # cut short by the turn's limit
        (CALL[:40] + "x" * 300, CALL, ANSWER),
    ],
)
async def test_the_reward_is_the_same_however_an_episode_is_driven(play, name, texts):
    result, record = await play(AGENTS[name], *texts)
    native, native_record = await play(NativePolicy(), *texts)
    assert result.failure is None
    assert (result.reward, result.reward_parts, result.turn_rewards) == (
        native.reward,
        native.reward_parts,
        native.turn_rewards,
    )
    assert len(record.sequences) == len(native_record.sequences) == 1
    assert record.breaks == native_record.breaks == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
async def test_a_budget_that_runs_out_is_a_truncation_with_its_reward(play, name):
    result, record = await play(AGENTS[name], CALL, MALFORMED, turn_budget=2)
    assert (result.stop_reason, result.reward) == (StopReason.MAX_TURNS, 0.4)
    assert record.exhausted is StopReason.MAX_TURNS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["responses", "chat"])
async def test_the_sdk_complains_of_what_failed_and_not_of_an_episode_s_end(
    serve, open_session, play, caplog, name
):
    caplog.set_level(logging.WARNING, "openai.agents")
    result, _ = await play(AGENTS[name], CALL, turn_budget=1)
    assert result.stop_reason is StopReason.MAX_TURNS
    assert not [record for record in caplog.records if record.name == "openai.agents"]

    result, _ = await play(AGENTS[name])  # the engine has nothing to say, and fails
    assert result.failure is not None
    assert any("Error getting response" in record.getMessage() for record in caplog.records) == (name == "responses")


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
async def test_an_environment_s_own_budget_ends_the_agent(play, name):
    result, record = await play(AGENTS[name], *[CALL] * 9, max_turns=3)
    assert (result.stop_reason, result.reward) == (StopReason.MAX_TURNS, 0.4)
    assert record.usage.turns == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
async def test_forty_turns_are_one_sequence(play, name):
    texts = [CALL, "So:\n" + CALL, CALL + CALL] * 13 + [ANSWER]
    result, record = await play(AGENTS[name], *texts, turn_budget=50, timeout_s=100, max_turns=50)
    assert result.reward == 1.0
    assert (len(record.sequences), record.breaks.total()) == (1, 0)
    assert len(record.sequences[0].turns) == 40


@pytest.mark.slow
@pytest.mark.camel
async def test_forty_turns_of_camel_are_one_sequence(serve, open_session):
    texts = [CALL, "So:\n" + CALL, CALL + CALL] * 13 + [ANSWER]
    async with serve(*(text + END for text in texts), max_length=20_000) as (_, recorder, _):
        session = open_session(recorder)
        environ = {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key}
        environ["CAMEL_LOGGING_DISABLED"] = "true"
        script = "tests/integration/camel_episode.py"
        command = [".venv-camel/bin/python", script, TASK, ENV_ID, '{"max_turns": 50}']
        finished = await run_program(command, "", environ)
        assert finished.status == 0, finished.errors
        assert json.loads(finished.output)["reward"] == 1.0
        record = recorder.close_session("episode-1")
        assert (len(record.sequences), record.breaks.total()) == (1, 0)
        assert len(record.sequences[0].turns) == 40


@pytest.mark.slow
async def test_a_handoff_is_two_agents_and_two_sequences(play):
    def build(tools):
        return Agent(name="triage", handoffs=[Agent(name="solver", tools=tools, instructions="Solve it.")])

    handoff = '<tool_call>\n{"name": "transfer_to_solver", "arguments": {}}\n</tool_call>'
    result, record = await play(OpenAIAgentsPolicy(build), handoff, CALL, ANSWER)
    assert result.reward == 1.0
    speakers = [[turn.agent_id for turn in sequence.turns] for sequence in record.sequences]
    assert speakers == [["triage"], ["solver", "solver"]]


@pytest.mark.slow
async def test_a_black_box_gets_the_reward_of_what_its_model_said(play):
    for texts, reward in [((CALL, ANSWER), 1.0), ((UNKNOWN, ANSWER), 0.0), ((CALL, "No."), 0.4), ((MALFORMED,), 0.0)]:
        result, record = await play(BlackBoxPolicy(BLACK_BOX), *texts)
        assert (result.stop_reason, result.reward) == (StopReason.FINISHED, reward)
        assert (len(record.sequences), record.breaks) == (1, {})


@pytest.mark.slow
async def test_a_black_box_that_dies_of_its_budget_is_truncated(play):
    result, _ = await play(BlackBoxPolicy(BLACK_BOX), CALL, turn_budget=1)
    assert (result.stop_reason, result.reward) == (StopReason.MAX_TURNS, 0.4)


LEAVES_A_CHILD = (
    "import subprocess, pathlib; child = subprocess.Popen(['sleep', '600']); "
    "pathlib.Path({path!r}).write_text(str(child.pid))"
)


def program(text):
    return BlackBoxPolicy([sys.executable, "-c", text])


async def test_a_black_box_that_crashes_is_a_failure_with_its_complaint(play):
    result, _ = await play(program("raise SystemExit('no such luck')"))
    assert (result.reward, result.failure.kind) == (None, "agent")
    assert "no such luck" in result.failure.message


async def test_the_complaint_of_a_black_box_moves_no_cursor(play):
    result, _ = await play(program("raise SystemExit('no \\x1b[2Jsuch\\x07 \\x9b2J\\u202eluck\\r')"))
    assert result.failure.message.endswith("no \\x1b[2Jsuch\\x07 \\x9b2J\\u202eluck")


async def test_a_black_box_that_asks_nothing_is_scored_by_its_answer(play):
    result, record = await play(program("print('Answer: 37')"))
    assert (result.stop_reason, result.reward, record.sequences) == (StopReason.FINISHED, 0.0, ())


async def test_a_program_that_is_not_there(play):
    result, _ = await play(BlackBoxPolicy(["no-such-program"]))
    assert (result.failure.kind, "no-such-program" in result.failure.message) == ("config", True)


async def test_a_black_box_that_hangs_is_killed_with_its_children(play, tmp_path):
    pids = tmp_path / "pids"
    result, _ = await play(program(LEAVES_A_CHILD.format(path=str(pids)) + "; child.wait()"), timeout_s=1.0)
    assert result.stop_reason is StopReason.DEADLINE
    assert not _runs(int(pids.read_text()))


async def test_what_a_black_box_leaves_running_does_not_hold_the_episode(play, tmp_path):
    pids = tmp_path / "pids"
    result, _ = await play(program(LEAVES_A_CHILD.format(path=str(pids))), timeout_s=15)
    assert result.failure is None
    assert not _runs(int(pids.read_text()))


LEAVES_A_DAEMON = (
    "import subprocess, pathlib; child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
    "pathlib.Path({path!r}).write_text(str(child.pid)); print('Answer: 37', flush=True)"
)


async def test_a_daemon_that_keeps_the_output_open_does_not_hold_the_episode(play, tmp_path):
    pids = tmp_path / "pids"
    began = time.monotonic()
    try:
        result, _ = await play(program(LEAVES_A_DAEMON.format(path=str(pids))), timeout_s=15)
        assert (result.failure, result.stop_reason) == (None, StopReason.FINISHED)
        assert time.monotonic() - began < 10
    finally:
        os.kill(int(pids.read_text()), signal.SIGKILL)


async def test_a_flood_of_output_is_cut(play):
    result, _ = await play(program("import sys; sys.stdout.write('x' * 5_000_000); sys.stderr.write('y' * 5_000_000)"))
    assert result.stop_reason is StopReason.FINISHED


async def test_a_black_box_sees_no_other_variable(play, monkeypatch, tmp_path):
    monkeypatch.setenv("A_SECRET", "x")
    seen = tmp_path / "seen"
    result, _ = await play(program(f"import os; open({str(seen)!r}, 'w').write('\\n'.join(os.environ)); print('x')"))
    assert result.failure is None
    names = set(seen.read_text().split())
    assert names - {"LC_CTYPE"} <= {
        "PATH", "HOME", "LANG", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"
    }  # fmt: skip


async def test_the_task_may_come_as_text_or_in_a_file(play):
    echo = "import sys; print(open(sys.argv[1]).read())"
    policy = BlackBoxPolicy([sys.executable, "-c", echo, "{task_file}"], task="text")
    assert (await play(policy))[0].failure is None
    policy = BlackBoxPolicy([sys.executable, "-c", "import sys; assert 'Liu has 17' in sys.stdin.read()"], task="text")
    assert (await play(policy))[0].failure is None


async def test_an_agent_that_speaks_http_needs_the_server(open_recorder, open_session):
    async with open_recorder() as recorder:
        run = make_runner(ENV_ID, {}, program("pass"), timeout_s=5)
        result = await run(EpisodeSpec("e", "g", ENV_ID, TASK, 0), open_session(recorder))
        assert (result.failure.kind, "GatewayServer" in result.failure.message) == ("config", True)


def _runs(pid):
    """Whether a process still does something: a zombie that its new parent has not collected does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
async def test_no_descriptor_and_no_task_is_left(play):
    await play(program("print('x')"))
    tasks, descriptors = asyncio.all_tasks(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await play(program("print('x')"))
    assert asyncio.all_tasks() == tasks
    assert len(os.listdir("/proc/self/fd")) <= descriptors
