"""One τ²-bench conversation through every adapter, on a scripted engine behind the served gateway: one reward."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("tau2", reason="needs the extra tau2")

import sparring  # noqa: F401  # registers the environments
from sparring.agents.native import NativePolicy
from sparring.agents.policy import Outcome
from sparring.agents.process import run_program
from sparring.agents.runner import make_runner
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.gateway.http import GatewayServer
from sparring.envs.hermes import message_text
from sparring.envs.tau2 import Tau2Env
from sparring.envs.tau2.transcript import calls
from sparring.errors import EngineError
from sparring.types import EpisodeSpec, Message, StopReason, ToolCall

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CAMEL_PYTHON = ROOT / ".venv-camel/bin/python"
GOLD = [("mock", "base/create_task_1"), ("mock", "base/update_task_with_message_history"), ("telecom", "base/{0}")]


class HttpPolicy:
    """A loop of one's own around OpenAI's client, with nothing but a base_url and a key."""

    async def play(self, env: Any, client: Any) -> Outcome:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api:
            while not env.done:
                conversation: list[Any] = [message.to_openai() for message in env.messages]
                answer = await api.chat.completions.create(model="any", messages=conversation, tools=env.tools)
                said = answer.choices[0].message
                calls: list[Any] = list(said.tool_calls or ())
                made = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in calls)
                await env.observe(Message("assistant", said.content, made))
                for call in made:
                    await env.call_tool(call.name, call.arguments)
                if not made:
                    await env.finish(said.content)
        return Outcome(env.stop_reason or StopReason.ABORTED)


def policy_of(name: str) -> Any:
    if name == "native":
        return NativePolicy()
    if name == "http":
        return HttpPolicy()
    from agents import Agent

    from sparring.agents.openai_agents import OpenAIAgentsPolicy

    return OpenAIAgentsPolicy(Agent(name="service"), use_responses=name == "responses")


async def spoken(domain: str, task_id: str, gold: bool) -> list[str]:
    """What the model says: the gold conversation, or only apologies."""
    env = Tau2Env(domain=domain)
    await env.areset(seed=0, options={"task_id": task_id})
    if not gold:
        return ["I am sorry."] * 8
    return [message_text(m) for m in env.demonstration() or [] if m.role == "assistant"]


@asynccontextmanager
async def served(folder: Path, texts: list[str], domain: str, task_id: str) -> Any:
    """A gateway whose engine says `texts`, with one session opened."""
    chat = ChatFormat.load(folder, tool_template="hermes-compact")
    encode = chat._tokenizer.encode
    engine = ScriptedEngine([encode(f"{text}<|im_end|>", add_special_tokens=False).ids for text in texts])
    await engine.start()
    recorder = Recorder(engine, chat, SamplingParams(max_new_tokens=4000), max_length=200_000)
    session = recorder.open_session("episode", turn_budget=100, token_budget=200_000)
    try:
        async with GatewayServer(recorder):
            yield EpisodeSpec("episode", "group", f"sparring/Tau2-{domain}-v0", task_id, seed=0), session
    finally:
        await recorder.aclose()


def first_task(domain: str, task_id: str) -> str:
    return Tau2Env(domain=domain).task_ids("base")[0] if task_id.endswith("{0}") else task_id


@pytest.mark.parametrize("gold", [True, False], ids=["gold", "nothing done"])
@pytest.mark.parametrize(("domain", "task_id"), GOLD)
@pytest.mark.parametrize("name", ["native", "http", "responses", "chat"])
async def test_an_episode_earns_the_same_through_every_adapter(
    tiny_qwen3: Path, name: str, domain: str, task_id: str, gold: bool
) -> None:
    task_id = first_task(domain, task_id)
    async with served(tiny_qwen3, await spoken(domain, task_id, gold), domain, task_id) as (spec, session):
        result = await make_runner(spec.env_id, {}, policy_of(name), timeout_s=60)(spec, session)
    assert result.failure is None
    assert result.reward == float(gold)
    assert result.stop_reason is StopReason.FINISHED


@pytest.mark.camel
async def test_a_camel_agent_in_its_own_virtual_environment(tiny_qwen3: Path) -> None:
    domain, task_id = GOLD[0]
    code = "import tau2, sparring.agents.camel"
    if (await run_program([str(CAMEL_PYTHON), "-c", code], "", {}, cwd=ROOT)).status != 0:
        pytest.skip("the CAMEL environment has no tau2")
    async with served(tiny_qwen3, await spoken(domain, task_id, gold=True), domain, task_id) as (spec, session):
        environ = {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key, "HOME": str(Path.home())}
        script = ROOT / "tests/integration/camel_episode.py"
        played = await run_program([str(CAMEL_PYTHON), str(script), task_id, spec.env_id], "", environ, cwd=ROOT)
    assert played.status == 0, played.errors
    assert json.loads(played.output.splitlines()[-1])["reward"] == 1.0


async def test_the_session_holds_the_conversation_as_one_sequence(tiny_qwen3: Path) -> None:
    domain, task_id = GOLD[0]
    texts = await spoken(domain, task_id, gold=True)
    async with served(tiny_qwen3, texts, domain, task_id) as (spec, session):
        await make_runner(spec.env_id, {}, NativePolicy(), timeout_s=60)(spec, session)
        record = session.close()
    (sequence,) = record.sequences
    assert len(sequence.turns) == len(texts)
    assert record.breaks.total() == 0


async def test_the_customer_is_a_model_behind_an_endpoint(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telecom's customer uses a tool of its own, as the endpoint's model says, and then ends the conversation."""
    call = '<tool_call>{"name": "check_status_bar", "arguments": {}}</tool_call>'
    texts = ["My phone does not work.", call, "It says that there is no signal.", "###STOP###"]
    async with served(tiny_qwen3, texts, "telecom", "") as (_, session):
        monkeypatch.setenv("TAU2_TEST_KEY", session.api_key)
        user = {"model": "any", "base_url": session.base_url, "api_key_env": "TAU2_TEST_KEY", "max_tokens": 200}
        env = Tau2Env(domain="telecom", user=user)
        observation, _ = await env.areset(seed=0, options={"task_id": env.task_ids("base")[0]})
        assert observation.endswith("My phone does not work.")
        observation, *_ = await env.astep("What does your status bar say?")
        assert observation == "It says that there is no signal."
        *_, terminated, _, info = await env.astep("I am sorry.")
    assert terminated
    assert info["tau2"]["termination_reason"] == "user_stop"
    assert [c.requestor for c in calls(env.entries)] == ["user"]
    spoken_by_user = [entry for entry in env.entries if entry.role == "user"]
    assert len(spoken_by_user) == len(texts)
    assert all(entry.usage and entry.usage["completion_tokens"] > 0 for entry in spoken_by_user)


async def test_an_endpoint_that_is_gone_is_a_failure() -> None:
    user = {"model": "any", "base_url": "http://127.0.0.1:9/v1", "max_retries": 0}
    env = Tau2Env(domain="mock", user=user)
    with pytest.raises(EngineError, match="user simulator failed: APIConnectionError"):
        await env.areset(seed=0)
    assert env.failure is not None
    assert env.failure.kind == "engine"
