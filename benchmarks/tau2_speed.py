"""τ²-bench: this environment and upstream's, on the same conversations, in one process, in turns.

    python -m benchmarks.tau2_speed [--tasks N] [--json FILE]

Every task's gold conversation is played in upstream's environment and scored by its evaluator, then played through
`Tau2Env`; the two verdicts must be equal. Ours pays for everything between `areset` and the returned info, upstream's
for its environment and its evaluator alone. A tool call is `World.respond` against `Environment.get_response`; a step,
from the agent's message to the observation, is `astep` against two steps of upstream's orchestrator. Upstream's logging
is switched off for both. Times are of the processor, not of the clock: both programs wait for nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks._report import Row, report
from sparring.envs.tau2 import GoldAgent, Tau2Env
from sparring.envs.tau2.conformance import Case, Puppet, cases, our_summary, upstream_play, upstream_score
from sparring.types import Message, ToolCall

_SPEEDUP = {"airline": 5.0, "retail": 5.0, "telecom": 2.0}


@dataclass
class _Times:
    """Seconds: one value a conversation, but for `calls` and `steps`, one a tool call of the agent."""

    reset: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)

    def whole(self) -> float:
        return statistics.mean(self.reset) + statistics.mean(self.score)


def _upstream(domain: str, task: Any, case: Case, times: _Times) -> dict[str, Any]:
    marks: list[tuple[str, float]] = []
    start = time.thread_time()
    played = upstream_play(domain, task, case, mark=lambda name, seconds: marks.append((name, seconds)))
    times.reset.append(next(at for name, at in marks if name == "reset") - start)
    times.calls += [seconds for name, seconds in marks if name == "tool"]
    start = time.thread_time()
    verdict = upstream_score(domain, task, played)
    times.score.append(time.thread_time() - start)
    _orchestrate(domain, task, case, times)
    return verdict


class _Reader:
    """An agent, or a user, of upstream's that reads its part out."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    def get_init_state(self, message_history: Any = None) -> None:
        return None

    def generate_next_message(self, message: Any, state: None) -> tuple[Any, None]:
        return self._messages.pop(0), None

    def is_stop(self, message: Any) -> bool:
        return False


def _orchestrate(domain: str, task: Any, case: Case, times: _Times) -> None:
    """The same conversation under upstream's orchestrator."""
    from tau2.data_model.message import AssistantMessage
    from tau2.orchestrator.orchestrator import Orchestrator, Role
    from tau2.registry import registry

    made = [message for message in upstream_play(domain, task, case).messages[1:] if message.role != "tool"]
    parts = [[message for message in made if isinstance(message, AssistantMessage) is agent] for agent in (True, False)]
    environment = registry.get_env_constructor(domain)()
    orchestrator = Orchestrator(domain, _Reader(parts[0]), _Reader(parts[1]), environment, task)
    orchestrator.initialize()
    while not orchestrator.done:
        start = time.thread_time()
        orchestrator.step()
        if orchestrator.from_role is Role.AGENT and orchestrator.to_role is Role.ENV:
            orchestrator.step()
            times.steps.append(time.thread_time() - start)


async def _ours(env: Tau2Env, task_id: str, case: Case, times: _Times) -> dict[str, Any]:
    env.user = Puppet([line for line in case.lines if line.speaker == "user"])
    start = time.thread_time()
    await env.areset(seed=0, options={"task_id": task_id})
    times.reset.append(time.thread_time() - start)
    for number, line in enumerate(line for line in case.lines if line.speaker == "assistant"):
        call = (ToolCall(f"call_{number}", line.tool, json.dumps(line.arguments)),) if line.tool else ()
        message = Message("assistant", line.text or None, call)
        start = time.thread_time()
        *_, terminated, _, _ = await env.astep(message)
        seconds = time.thread_time() - start
        if line.tool:
            times.steps.append(seconds)
        elif terminated:
            times.score.append(seconds)
    world = env.start.world("tool calls alone")
    for line in case.lines:
        if line.tool:
            start = time.thread_time()
            world.respond(line.tool, line.arguments or {}, line.speaker)
            if line.speaker == "assistant":
                times.calls.append(time.thread_time() - start)
    return our_summary(env)


async def _paired(domain: str, count: int) -> tuple[list[Row], dict[str, Any]]:
    env = Tau2Env(domain=domain)
    ids = env.task_ids("base")
    ids = ids[:: max(1, len(ids) // count)][:count]
    upstream, ours = _Times(), _Times()
    differ = 0
    for task_id in (ids[0], *ids):  # the first one again: once to warm both up
        task = env.domain.task(task_id.partition("/")[2])
        case = next(cases(task))
        theirs = _upstream(domain, task, case, upstream)
        differ += theirs != await _ours(env, task_id, case, ours)
    for times in (upstream, ours):
        del times.reset[0], times.score[0]
    speedup = upstream.whole() / ours.whole()
    rows = [
        Row(f"{domain}: reset and evaluation, upstream's over ours", speedup, "x", _SPEEDUP[domain]),
        _ratio(f"{domain}: tool call, ours over upstream's", ours.calls, upstream.calls),
        _ratio(f"{domain}: step with a tool call, ours over upstream's", ours.steps, upstream.steps),
        Row(f"{domain}: verdicts that differ", differ, "", 0, at_most=True),
    ]
    for name, kind, scale, unit in (
        ("reset", "reset", 1e3, "ms"),
        ("evaluation", "score", 1e3, "ms"),
        ("tool call", "calls", 1e6, "µs"),
        ("step with a tool call", "steps", 1e6, "µs"),
    ):
        for whose, times in (("upstream", upstream), ("ours", ours)):
            rows.append(Row(f"{domain}: {name}, {whose}", statistics.mean(getattr(times, kind)) * scale, unit))
    return rows, {"tasks": len(ids), "tool_calls": len(ours.calls)}


def _ratio(name: str, ours: list[float], upstream: list[float]) -> Row:
    return Row(name, statistics.mean(ours) / statistics.mean(upstream), "x", 1.1, at_most=True)


def _memory(domain: str, count: int) -> list[Row]:
    """Bytes of one more idle episode, at its start and after its gold actions, the messages included on both sides."""
    loop = asyncio.new_event_loop()
    env = Tau2Env(domain=domain)
    ids = env.task_ids("base")[:count]
    chosen = [(task_id, env.domain.task(task_id.partition("/")[2])) for task_id in ids]

    def theirs(whole: bool) -> list[Any]:
        return [upstream_play(domain, task, next(cases(task)) if whole else Case("", ())) for _, task in chosen]

    async def play(task_id: str, whole: bool) -> Tau2Env:
        episode = Tau2Env(domain=domain)
        await episode.areset(seed=0, options={"task_id": task_id})
        agent = GoldAgent(episode.task)
        while whole and not episode.done:
            await episode.astep(agent.next_message())
        return episode

    def ours(whole: bool) -> list[Any]:
        return [loop.run_until_complete(play(task_id, whole)) for task_id, _ in chosen]

    rows = []
    for name, whole in (("at its start", False), ("after its gold actions", True)):
        sizes = [_bytes(partial(make, whole)) / count for make in (theirs, ours)]
        bound = None if whole else 10.0
        rows.append(Row(f"{domain}: idle episode {name}, upstream's memory over ours", sizes[0] / sizes[1], "x", bound))
        rows.append(Row(f"{domain}: idle episode {name}, ours", sizes[1] / 1e3, "kB"))
    loop.close()
    return rows


def _bytes(make: Callable[[], list[Any]]) -> int:
    make()  # what is loaded once for the process is not an episode's
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = make()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    del kept
    return size


async def _at_once(domain: str, count: int) -> list[Row]:
    """Many conversations side by side, the gold agent giving way to the others before each message."""
    ids = Tau2Env(domain=domain).task_ids("base")

    async def play(number: int) -> float:
        env = Tau2Env(domain=domain)
        await env.areset(seed=number, options={"task_id": ids[number % len(ids)]})
        agent = GoldAgent(env.task)
        while not env.done:
            await asyncio.sleep(0)
            await env.astep(agent.next_message())
        return env.reward

    threads = threading.active_count()
    start = time.perf_counter()
    rewards = await asyncio.gather(*map(play, range(count)))
    seconds = time.perf_counter() - start
    return [
        Row(f"{domain}: {count} conversations at once, solved", sum(rewards), "", count),
        Row(f"{domain}: {count} conversations at once, time", seconds, "s"),
        Row(f"{domain}: threads they added", threading.active_count() - threads, "", 0, at_most=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20, help="tasks a domain")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for domain in _SPEEDUP:
        more, details[domain] = asyncio.run(_paired(domain, arguments.tasks))
        rows += more + _memory(domain, 4)
    rows += asyncio.run(_at_once("retail", 256))
    return report("τ²-bench, paired with upstream", rows, arguments.json, details)


if __name__ == "__main__":
    raise SystemExit(main())
