"""What a step of an environment costs beside its tool: Calculator without a model, and CartPole for scale.

    python -m benchmarks.env_step [--json FILE] [--episodes N]

The tool alone and the whole step are timed in turns, episode by episode, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

import gymnasium

from benchmarks._report import Row, report
from sparring.envs.calculator import Calculator
from sparring.envs.hermes import message_text
from sparring.types import Message

_BOUND_US = 50.0


def _actions(env: Calculator) -> tuple[str, str]:
    """The gold episode as raw text, which costs more than structured messages: the environment parses it."""
    call, _, answer = env.demonstration()
    return message_text(call), message_text(answer)


async def _time_async(episodes: int) -> tuple[list[float], list[float]]:
    """Microseconds of every call step, and of the same tool called directly right after it."""
    env, direct = Calculator(), Calculator()
    steps, tools = [], []
    for episode in range(episodes):
        await env.areset(seed=episode)
        await direct.areset(seed=episode)
        call, answer = _actions(env)
        expression = direct.demonstration()[0].tool_calls[0].arguments.split('"')[3]
        start = time.perf_counter_ns()
        await env.astep(call)
        middle = time.perf_counter_ns()
        await direct.calculator(expression)
        end = time.perf_counter_ns()
        steps.append((middle - start) / 1e3)
        tools.append((end - middle) / 1e3)
        await env.astep(answer)
        if env.reward != 1.0:
            raise SystemExit(f"the gold episode of {env.task_id} earned {env.reward}: this would measure an error path")
    return steps, tools


def _time_structured(episodes: int) -> list[float]:
    async def play() -> list[float]:
        env, steps = Calculator(), []
        for episode in range(episodes):
            await env.areset(seed=episode)
            call: Message = env.demonstration()[0]
            start = time.perf_counter_ns()
            await env.astep(call)
            steps.append((time.perf_counter_ns() - start) / 1e3)
        return steps

    return asyncio.run(play())


def _time_sync(episodes: int) -> list[float]:
    env, steps = Calculator(), []
    for episode in range(episodes):
        env.reset(seed=episode)
        call, _ = _actions(env)
        start = time.perf_counter_ns()
        env.step(call)
        steps.append((time.perf_counter_ns() - start) / 1e3)
    env.close()
    return steps


def _time_cartpole(count: int) -> list[float]:
    env, steps = gymnasium.make("CartPole-v1").unwrapped, []
    env.reset(seed=0)
    for _ in range(count):
        start = time.perf_counter_ns()
        _, _, terminated, _, _ = env.step(0)
        steps.append((time.perf_counter_ns() - start) / 1e3)
        if terminated:
            env.reset()
    return steps


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--episodes", type=int, default=3000)
    arguments = parser.parse_args()
    asyncio.run(_time_async(200))  # warm up
    steps, tools = asyncio.run(_time_async(arguments.episodes))
    beyond = [step - tool for step, tool in zip(steps, tools, strict=True)]
    structured = _time_structured(arguments.episodes)
    face = _time_sync(arguments.episodes)
    cartpole = _time_cartpole(arguments.episodes)
    rows = [
        Row("astep beyond its tool, raw text, median", statistics.median(beyond), "µs", _BOUND_US, at_most=True),
        Row("astep beyond its tool, raw text, p99", _p99(beyond), "µs"),
        Row("astep, raw text, median", statistics.median(steps), "µs"),
        Row("astep, structured message, median", statistics.median(structured), "µs"),
        Row("the tool alone, median", statistics.median(tools), "µs"),
        Row("synchronous step, median", statistics.median(face), "µs"),
        Row("Gymnasium CartPole step, median", statistics.median(cartpole), "µs"),
    ]
    return report("Environment step", rows, arguments.json, {"episodes": arguments.episodes})


if __name__ == "__main__":
    raise SystemExit(main())
