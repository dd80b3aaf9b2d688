"""Upstream's results files: written for its viewer and evaluators to read, and read back to be scored again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sparring.envs.tau2.domain import Domain, load_domain, quiet
from sparring.envs.tau2.env import Tau2Env
from sparring.envs.tau2.transcript import Entry, entries_of
from sparring.envs.tau2.verdict import Verdict, evaluate, premature
from sparring.errors import TaskError

__all__ = ["read_results", "rescore", "results", "simulation", "write_results"]


def simulation(
    env: Tau2Env,
    *,
    started: datetime,
    finished: datetime,
    trial: int = 0,
    seed: int | None = None,
    agent_failed: bool = False,
) -> dict[str, Any]:
    """The finished episode of `env` as upstream's `SimulationRun`, in JSON form.

    Costs are sums over the messages of a side; None where one of them has none. An episode whose infrastructure failed,
    the agent's or the user's, is marked as skipped, which is what upstream calls it.

    Raises:
        TaskError: the conversation is not over.
    """
    if not (env.done or agent_failed):
        raise TaskError(f"the conversation about {env.task_id} is not over: it cannot be written yet")
    upstream_id = env.task_id.partition("/")[2]
    reason = "agent_error" if agent_failed else "user_error" if env.failure else env.report()["termination_reason"]
    return {
        "id": f"{upstream_id}_{trial}_{env.episode_seed}",
        "task_id": upstream_id,
        "timestamp": finished.isoformat(),
        "start_time": started.isoformat(),
        "end_time": finished.isoformat(),
        "duration": (finished - started).total_seconds(),
        "termination_reason": reason,
        "agent_cost": _cost(env.entries, "assistant"),
        "user_cost": _cost(env.entries, "user"),
        "reward_info": _reward_info(env.task, env.verdict or premature(reason)),
        "messages": list(_messages(env.entries, started)),
        "trial": trial,
        "seed": seed,
        "skipped": agent_failed or env.failure is not None,
    }


def _cost(entries: Iterable[Entry], role: str) -> float | None:
    costs = [entry.cost for entry in entries if entry.role == role]
    return None if any(cost is None for cost in costs) else sum(cost or 0.0 for cost in costs)


def _messages(entries: Iterable[Entry], started: datetime) -> Iterator[dict[str, Any]]:
    """Upstream sorts messages by their time, so each is a millisecond after the one before."""
    for index, entry in enumerate(entries):
        common = {
            "role": entry.role,
            "content": entry.content,
            "turn_idx": index,
            "timestamp": (started + timedelta(milliseconds=index)).isoformat(timespec="microseconds"),
        }
        if entry.role == "tool":
            yield {**common, "id": entry.call_id, "requestor": entry.requestor, "error": entry.error}
            continue
        made = [
            {"id": call.id, "name": call.name, "arguments": dict(call.arguments), "requestor": call.requestor}
            for call in entry.calls
        ]
        usage = dict(entry.usage) if entry.usage else None
        yield {**common, "tool_calls": made or None, "cost": entry.cost, "usage": usage, "raw_data": None}


def _reward_info(task: Any, verdict: Verdict) -> dict[str, Any]:
    """Upstream's `RewardInfo`. Without a criterion of a kind, upstream leaves its checks out."""
    criteria = task.evaluation_criteria
    info: dict[str, Any] = {"reward": verdict.reward, "reward_basis": None, "reward_breakdown": verdict.breakdown}
    if verdict.note or criteria is None:
        return {**info, "info": {"note": verdict.note, "error": verdict.error or None}}
    return {
        **info,
        "reward_basis": [part.value for part in criteria.reward_basis],
        "db_check": {"db_match": verdict.db_match, "db_reward": float(bool(verdict.db_match))},
        "env_assertions": [
            {"env_assertion": assertion.model_dump(mode="json"), "met": met, "reward": float(met)}
            for assertion, met in zip(criteria.env_assertions or (), verdict.env_assertions, strict=True)
        ],
        "action_checks": [
            {"action": action.model_dump(mode="json"), "action_match": taken, "action_reward": float(taken)}
            for action, taken in zip(criteria.actions or (), verdict.actions, strict=True)
        ],
        "communicate_checks": [
            {"info": fact, "met": met, "justification": f"Information '{fact}' {'' if met else 'not '}communicated."}
            for fact, met in zip(criteria.communicate_info or (), verdict.communicated, strict=True)
        ],
        "nl_assertions": None
        if verdict.nl_assertions is None
        else [
            {"nl_assertion": text, "met": met, "justification": "judged by the configured judge"}
            for text, met in zip(criteria.nl_assertions or (), verdict.nl_assertions, strict=True)
        ],
    }


def results(domain: Domain, simulations: Iterable[Mapping[str, Any]], **info: Any) -> dict[str, Any]:
    """A whole results file, in JSON form.

    Args:
        info: `num_trials`, `max_steps`, `max_errors`, `seed`, and `agent` and `user`, each a mapping with
            `implementation`, `llm` and `llm_args`. An implementation whose name ends in "solo" plays without a user.
    """
    simulations = list(simulations)
    tasks = [domain.task(task_id) for task_id in dict.fromkeys(run["task_id"] for run in simulations)]
    return {
        "timestamp": datetime.now().isoformat(),
        "info": {
            "git_commit": "unknown",
            "num_trials": info["num_trials"],
            "max_steps": info["max_steps"],
            "max_errors": info["max_errors"],
            "user_info": {"global_simulation_guidelines": None, **info["user"]},
            "agent_info": info["agent"],
            "environment_info": {"domain_name": domain.name, "policy": domain.environment.get_policy()},
            "seed": info["seed"],
        },
        "tasks": [task.model_dump(mode="json") for task in tasks],
        "simulations": simulations,
    }


def write_results(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write a results file so that it is at any time either the old or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2))
    os.replace(partial, path)


def read_results(path: str | Path) -> Any:
    """A results file, upstream's or ours, as upstream's `Results`.

    Raises:
        TaskError: there is none, or it is not one.
    """
    quiet()
    from tau2.data_model.simulation import Results

    try:
        return Results.model_validate_json(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise TaskError(f"{path} cannot be read as a τ²-bench results file: {error}") from error


def rescore(read: Any) -> list[Verdict]:
    """Score every simulation of a results file again, by its own copy of the task, as upstream's evaluator would.

    Upstream replays each tool call, and ends with a ValueError where a tool now answers otherwise than the file says;
    such a simulation has `error` set.
    """
    name = read.info.environment_info.domain_name.removesuffix("-workflow")  # telecom under another policy
    domain = load_domain(name, solo=read.info.agent_info.implementation.endswith("solo"))
    tasks = {task.id: task for task in read.tasks}
    return [_rescored(domain, tasks[run.task_id], run) for run in read.simulations]


def _rescored(domain: Domain, task: Any, run: Any) -> Verdict:
    reason = run.termination_reason.value
    if reason not in ("agent_stop", "user_stop"):
        return premature(reason)
    entries = entries_of(run.messages)
    start = domain.fresh_start(task)
    world = start.world("replayed")
    history = len((task.initial_state.message_history if task.initial_state else None) or [])
    rest = iter(entries[history:])
    for entry in rest:
        for call in entry.calls:
            answer = next(rest, None)
            content, _ = world.respond(call.name, call.arguments, call.requestor)
            if answer is None or answer.call_id != call.id or not _same_answer(content, answer.content):
                return Verdict(0.0, {}, error="ValueError", note=f"the call {call.id!r} of {call.name} does not replay")
    return evaluate(task, world, start.gold, entries)


def _same_answer(content: str, expected: str | None) -> bool:
    try:
        return bool(json.loads(content) == json.loads(expected or ""))
    except ValueError:
        return content == expected
