"""The same conversation through upstream's evaluator and through ours: what makes scores comparable.

A case is a whole conversation written out beforehand, derived from a task's gold actions. `upstream_verdict` plays it
in
upstream's environment and scores it with upstream's evaluator; `our_verdict` plays it through `Tau2Env`. Equal means:
equal reward, components, single checks, and the same text returned by every tool call.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparring.envs.tau2.domain import FIRST_MESSAGE
from sparring.envs.tau2.env import Tau2Env
from sparring.envs.tau2.transcript import Call, Entry
from sparring.envs.tau2.user import UserSide
from sparring.types import Message, ToolCall

__all__ = [
    "Case",
    "Line",
    "Puppet",
    "UpstreamPlay",
    "cases",
    "disagreements",
    "our_summary",
    "our_verdict",
    "upstream_play",
    "upstream_score",
    "upstream_verdict",
]

STOP = "###STOP###"
_RANDOM_BILL = re.compile(r"\bB[0-9a-f]{8}\b")  # telecom names new bills by uuid4


@dataclass(frozen=True)
class Line:
    """One message of a written-out conversation: a text, or one tool call."""

    speaker: Literal["assistant", "user"]
    text: str = ""
    tool: str = ""
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    name: str
    lines: tuple[Line, ...]


def cases(task: Any) -> Iterator[Case]:
    """The conversations that a task (tau2's `Task`) is checked on.

    Gold; nothing done; each gold action dropped in turn; an argument of the first and of the last action changed; the
    order reversed; the facts left unsaid.
    """
    criteria = task.evaluation_criteria
    actions = list((criteria.actions if criteria else None) or [])
    facts = list((criteria.communicate_info if criteria else None) or [])
    yield _case("gold", actions, facts)
    yield _case("nothing", [], [])
    for index in range(len(actions)):
        yield _case(f"drop-{index}", actions[:index] + actions[index + 1 :], facts)
    with_arguments = [index for index, action in enumerate(actions) if action.arguments]
    for index in dict.fromkeys(with_arguments[:1] + with_arguments[-1:]):
        changed = actions[index].model_copy(update={"arguments": _change(actions[index].arguments)})
        yield _case(f"argument-{index}", [*actions[:index], changed, *actions[index + 1 :]], facts)
    if len(actions) > 1:
        yield _case("reversed", actions[::-1], facts)
    if facts:
        yield _case("unsaid", actions, [])


def _case(name: str, actions: Sequence[Any], facts: Sequence[str]) -> Case:
    lines = [Line("user", "Hello.")]
    for action in actions:
        if action.requestor == "user" and lines[-1].speaker == "assistant" and lines[-1].tool:
            lines.append(Line("assistant", "Please go on."))
        elif action.requestor == "assistant" and lines[-1].speaker == "user" and lines[-1].tool:
            lines.append(Line("user", "It is done."))
        elif action.requestor == "user" and lines[-1].speaker == "user" and not lines[-1].tool:
            lines.append(Line("assistant", "Please go on."))
        lines.append(Line(action.requestor, tool=action.name, arguments=action.arguments))
    if lines[-1].speaker == "user" and lines[-1].tool:
        lines.append(Line("user", "It is done."))
    lines.append(Line("assistant", " ".join(["That is all.", *facts])))
    lines.append(Line("user", STOP))
    return Case(name, tuple(lines))


def _change(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the last one, by name, made wrong."""
    key = max(arguments)
    value = arguments[key]
    changed: Any
    if isinstance(value, bool):
        changed = not value
    elif isinstance(value, int | float):
        changed = value + 1
    elif isinstance(value, str):
        changed = value + "x"
    elif isinstance(value, list):
        changed = value[:-1]
    else:
        changed = None
    return {**arguments, key: changed}


def observation_digest(contents: Sequence[str]) -> str:
    """Twelve hex digits over what the tools returned, random bill ids masked."""
    text = "\0".join(_RANDOM_BILL.sub("B", content) for content in contents)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def summary(
    reward: float,
    parts: Mapping[str, float],
    db: bool | None,
    env: Sequence[bool],
    actions: Sequence[bool],
    communicated: Sequence[bool],
    contents: Sequence[str],
) -> dict[str, Any]:
    """A verdict as a small JSON object: single checks as bits, in the order of the task's criteria."""

    def bits(checks: Sequence[bool]) -> str:
        return "".join(str(int(check)) for check in checks)

    return {
        "reward": reward,
        "parts": dict(sorted(parts.items())),
        "db": db,
        "env": bits(env),
        "action": bits(actions),
        "communicate": bits(communicated),
        "tools": observation_digest(contents),
    }


class Puppet:
    """A user that says and does what a case says."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = list(lines)

    async def __call__(self, side: UserSide) -> Entry:
        line = self._lines.pop(0)
        if not line.tool:
            return Entry("user", line.text)
        return Entry("user", None, (Call(f"user_{len(side.messages)}", line.tool, dict(line.arguments or {}), "user"),))


async def our_verdict(env: Tau2Env, task_id: str, case: Case) -> dict[str, Any]:
    """Play a case through the environment: the agent's lines as actions, the user's by a puppet."""
    env.user = Puppet([line for line in case.lines if line.speaker == "user"])
    await env.areset(seed=0, options={"task_id": task_id})
    agent = [line for line in case.lines if line.speaker == "assistant"]
    for number, line in enumerate(agent):
        if line.tool:
            call = ToolCall(f"call_{number}", line.tool, json.dumps(line.arguments))
            await env.astep(Message("assistant", tool_calls=(call,)))
        else:
            await env.astep(Message("assistant", line.text))
    return our_summary(env)


async def disagreements(
    env: Tau2Env, split: str, expected: Mapping[str, Mapping[str, Any]]
) -> tuple[int, list[tuple[str, str, Any, Any]]]:
    """Play every case of every task of a split.

    Args:
        expected: upstream's verdicts, by upstream's task id and by the case's name.

    Returns:
        how many verdicts were compared, and (task, case, ours, upstream's) for those that differ.
    """
    compared, differ = 0, []
    for task_id in env.task_ids(split):
        upstream_id = task_id.partition("/")[2]
        for case in cases(env.domain.task(upstream_id)):
            ours, theirs = await our_verdict(env, task_id, case), expected[upstream_id][case.name]
            compared += 1
            if ours != theirs:
                differ.append((task_id, case.name, ours, theirs))
    return compared, differ


def our_summary(env: Tau2Env) -> dict[str, Any]:
    """The verdict on an episode that is over, and what its tools returned."""
    verdict = env.verdict
    if verdict is None:
        raise AssertionError(f"the conversation about {env.task_id} did not end")
    if verdict.error:
        return {"error": verdict.error}
    contents = [entry.content or "" for entry in env.entries[len(env.opening) :] if entry.role == "tool"]
    return summary(
        verdict.reward, verdict.breakdown, verdict.db_match, verdict.env_assertions, verdict.actions,
        verdict.communicated, contents,
    )  # fmt: skip


def upstream_verdict(domain: str, task: Any, case: Case) -> dict[str, Any]:
    """Play a case in upstream's environment, score it with upstream's evaluator; `{"error": ...}` where it raises."""
    return upstream_score(domain, task, upstream_play(domain, task, case))


@dataclass(frozen=True)
class UpstreamPlay:
    """A conversation in upstream's environment, with the messages that came of it and what the tools returned."""

    environment: Any
    messages: list[Any]
    contents: list[str]


def upstream_play(
    domain: str, task: Any, case: Case, mark: Callable[[str, float], None] = lambda name, seconds: None
) -> UpstreamPlay:
    """Play a case in upstream's environment. `mark` is told when the reset was over, and the seconds of each call."""
    from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
    from tau2.registry import registry

    _reset_upstream_globals()
    environment = registry.get_env_constructor(domain)()
    state = task.initial_state
    history = list((state.message_history if state else None) or [])
    environment.set_state(
        initialization_data=state.initialization_data if state else None,
        initialization_actions=state.initialization_actions if state else None,
        message_history=history,
    )
    mark("reset", time.thread_time())
    messages: list[Any] = history or [AssistantMessage(role="assistant", content=FIRST_MESSAGE)]
    contents: list[str] = []
    for number, line in enumerate(case.lines):
        kind = AssistantMessage if line.speaker == "assistant" else UserMessage
        if not line.tool:
            messages.append(kind(role=line.speaker, content=line.text))
            continue
        arguments = dict(line.arguments or {})
        call = ToolCall(id=f"call_{number}", name=line.tool, arguments=arguments, requestor=line.speaker)
        start = time.thread_time()
        response = environment.get_response(call)
        if line.speaker == "assistant":
            mark("tool", time.thread_time() - start)
        contents.append(response.content)
        messages += [kind(role=line.speaker, tool_calls=[call]), response]
    return UpstreamPlay(environment, messages, contents)


def upstream_score(domain: str, task: Any, played: UpstreamPlay) -> dict[str, Any]:
    """What upstream's evaluator says of a conversation that the user ended."""
    from tau2.data_model.simulation import SimulationRun
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    simulation = SimulationRun(
        id="conformance", task_id=task.id, start_time="", end_time="", duration=0.0, termination_reason="user_stop",
        messages=played.messages,
    )  # fmt: skip
    _reset_upstream_globals()
    try:
        info = evaluate_simulation(simulation, task, EvaluationType.ALL, solo_mode=False, domain=domain)
    except Exception as error:
        return {"error": type(error).__name__}
    return summary(
        info.reward,
        {kind.value: value for kind, value in (info.reward_breakdown or {}).items()},
        info.db_check and info.db_check.db_match,
        [check.met for check in info.env_assertions or ()],
        [check.action_match for check in info.action_checks or ()],
        [check.met for check in info.communicate_checks or ()],
        played.contents,
    )


def _reset_upstream_globals() -> None:
    """Upstream's telecom user tools keep a VPN profile on the class and break it in place, for every later episode."""
    from tau2.domains.telecom.user_data_model import PerformanceLevel
    from tau2.domains.telecom.user_tools import TelecomUserTools

    TelecomUserTools.default_vpn_details.server_performance = PerformanceLevel.EXCELLENT
