"""Agents that others wrote play on SmolLM2: exported tokens are the engine's, rewards are the native loop's."""

import json
import sys
from pathlib import Path

import gymnasium
import pytest
import pytest_asyncio
from agents import Agent, function_tool

from sparring.agents.blackbox import BlackBoxPolicy
from sparring.agents.native import NativePolicy
from sparring.agents.openai_agents import OpenAIAgentsPolicy
from sparring.agents.process import run_program
from sparring.envs.calculator import Calculator
from sparring.types import Message, ToolCall

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from gateway_model import assert_exact, open_arena  # noqa: E402  # a module beside this one, which importlib mode does not find

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
CAMEL_PYTHON = str(ROOT / ".venv-camel/bin/python")
QUIET = {"CAMEL_LOGGING_DISABLED": "true"}  # it logs to standard output, where answers go


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena(smollm2):
    async with open_arena(smollm2) as arena:
        yield arena


@pytest.mark.parametrize(
    "policy",
    [
        NativePolicy(),
        OpenAIAgentsPolicy(Agent(name="solver")),
        OpenAIAgentsPolicy(Agent(name="solver"), use_responses=False),
        BlackBoxPolicy([sys.executable, str(ROOT / "examples/blackbox/agent.py")]),
    ],
    ids=["native", "responses", "chat", "blackbox"],
)
async def test_an_agent_s_episode_is_exact(arena, policy):
    _, record = await arena.play(policy, "train/3")
    assert len(record.sequences) == 1
    assert record.breaks.total() == 0


class HandoffCalculator(Calculator):
    """Shows a handoff in its worked example: a model this small calls what its example calls."""

    async def _begin(self, task_id):
        system, question, *example, task = await super()._begin(task_id)
        call = Message("assistant", tool_calls=(ToolCall("example-0", "transfer_to_solver", "{}"),))
        answer = Message("tool", "The solver is here.", tool_call_id="example-0", name="transfer_to_solver")
        return [system, question, call, answer, *example, task]


async def test_an_agent_with_a_tool_of_its_own_and_a_handoff(arena):
    env_id = "sparring-tests/HandoffCalculator-v0"
    gymnasium.register(env_id, entry_point=HandoffCalculator)

    @function_tool
    def look_up(name: str) -> str:
        """Look a person up."""
        return f"{name} is a teacher."

    def build(tools):
        solver = Agent(name="solver", tools=[*tools, look_up], instructions="You solve problems with a calculator.")
        return Agent(name="triage", handoffs=[solver])

    for task in range(8):
        _, record = await arena.play(OpenAIAgentsPolicy(build), f"train/{task}", env_id)
        assert record.breaks.total() == len(record.sequences) - 1
        speakers = [turn.agent_id for sequence in record.sequences for turn in sequence.turns]
        assert speakers[0] == "triage"
        if "solver" in speakers:
            return
    pytest.fail("the model never handed over")


@pytest.mark.camel
async def test_a_camel_agent_as_a_black_box(arena):
    policy = BlackBoxPolicy([CAMEL_PYTHON, str(ROOT / "examples/blackbox/camel_agent.py")], environ=QUIET)
    _, record = await arena.play(policy, "train/3")
    assert len(record.sequences) == 1
    assert record.breaks.total() == 0


@pytest.mark.camel
async def test_the_camel_adapter(arena):
    """The adapter lives in the other virtual environment, and so does its copy of the environment."""
    spec, session = arena.open("train/3")
    environ = {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key, **QUIET}
    script = ROOT / "tests/integration/camel_episode.py"
    finished = await run_program([CAMEL_PYTHON, str(script), spec.task_id], "", environ, cwd=ROOT)
    assert finished.status == 0, finished.errors
    played = json.loads(finished.output)
    record = arena.recorder.close_session(spec.episode_id)
    assert_exact(record, arena.engine.log)
    assert (len(record.sequences), record.breaks.total()) == (1, 0)
    native = await arena.native(spec, session)
    assert played == {"reward": native.reward, "reward_parts": native.reward_parts, "failure": None}
