"""τ²-bench: pass^1 to pass^4 by domain, beside published figures.

    python -m benchmarks.tau2 --domain retail --agent gold
    python -m benchmarks.tau2 --domain mock --model smollm2 --trials 2
    python -m benchmarks.tau2 --domain airline,retail,telecom --model gpt-4.1 --base-url https://... \\
        --user gpt-4.1 --user-base-url https://... --trials 4 --out runs/tau2
    python -m benchmarks.tau2 --rescore runs/tau2/retail.json

Each domain's conversations are kept in upstream's results format as they finish; the same command goes on where it
stopped. An episode whose infrastructure failed is played again then, and counts in no score.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._tau2_agents import Agent, endpoint_agent, gold_agent, idle_agent, local_agent, user_argument
from sparring.envs.tau2 import OpenAIModel, Tau2Env
from sparring.envs.tau2.domain import DOMAINS
from sparring.envs.tau2.results import read_results, rescore, results, simulation, write_results
from sparring.errors import ConfigError, EngineError, GatewayError
from sparring.evaluation import wilson_interval
from sparring.transcript import printable
from sparring.types import Usage

_SAVE_EVERY_S = 5.0
_PUBLISHED = {  # pass^1 in percent, with GPT-4.1 as the user
    "GPT-4.1": {"retail": 74.0, "airline": 56.0, "telecom": 34.0},
    "GPT-5": {"retail": 81.6, "airline": 62.5, "telecom": 95.8},
}
_SOURCE = "τ²-bench leaderboard, taubench.com"


async def run_domain(domain: str, agent: Agent, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Play what is not in the results file yet, and return all its simulations."""
    user = user_argument(None if arguments.user == "scripted" else arguments.user, *_user_endpoint(arguments))
    first = Tau2Env(domain=domain, solo=arguments.solo, user=user)
    task_ids = first.task_ids(arguments.split)[: arguments.tasks]
    random.seed(arguments.seed)  # as upstream draws the trials' seeds
    seeds = [random.randint(0, 1_000_000) for _ in range(arguments.trials)]
    path = Path(arguments.out) / f"{domain}.json"
    info = _info(arguments, first)
    done = _finished(path, info) if path.exists() else []
    played = {(run["task_id"], run["trial"], run["seed"]) for run in done}
    todo = [
        (task_id, trial, seed)
        for trial, seed in enumerate(seeds)
        for task_id in task_ids
        if (task_id.partition("/")[2], trial, seed) not in played
    ]
    if done:
        print(f"{domain}: {len(done)} conversations from {path}, {len(todo)} to play", flush=True)
    slots = asyncio.Semaphore(arguments.concurrency)
    saved_at = time.monotonic()

    async def one(task_id: str, trial: int, seed: int) -> None:
        nonlocal saved_at
        async with slots:
            env = Tau2Env(domain=domain, solo=arguments.solo, user=user, max_turns=arguments.max_turns)
            done.append(await play(env, agent, task_id, trial, seed, arguments.price))
        if time.monotonic() - saved_at > _SAVE_EVERY_S:
            write_results(path, results(first.domain, done, **info))
            saved_at = time.monotonic()

    try:
        async with asyncio.TaskGroup() as group:
            for item in todo:
                group.create_task(one(*item))
    finally:
        write_results(path, results(first.domain, done, **info))
    return done


async def play(
    env: Tau2Env, agent: Agent, task_id: str, trial: int, seed: int, price: Sequence[float] | None
) -> dict[str, Any]:
    """One conversation. A failure of the infrastructure is written down as such."""
    started, failed = datetime.now(), False
    try:
        await env.areset(seed=seed, options={"task_id": task_id})
        with agent(env) as say:
            while not env.done:
                message, usage = await say()
                if message is None:
                    break
                spoken = len(env.entries)
                await env.astep(message)
                _charge(env, spoken, usage, price)
    except (EngineError, GatewayError) as error:
        print(f"{task_id}, trial {trial}: {type(error).__name__}: {printable(str(error))}", flush=True)
        failed = True
    agent_failed = failed and env.failure is None
    return simulation(
        env, started=started, finished=datetime.now(), trial=trial, seed=seed, agent_failed=agent_failed
    )  # fmt: skip


def _charge(env: Tau2Env, spoken: int, usage: Usage, price: Sequence[float] | None) -> None:
    """Note on the agent's message what it cost."""
    cost = None
    if price is not None:
        cost = (usage.prompt_tokens * price[0] + usage.completion_tokens * price[1]) / 1e6
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    for index in range(spoken, len(env.entries)):
        if env.entries[index].role == "assistant":
            env.entries[index] = dataclasses.replace(env.entries[index], usage=counts, cost=cost)
            return


def _info(arguments: argparse.Namespace, env: Tau2Env) -> dict[str, Any]:
    agent_args = {"temperature": arguments.temperature, "base_url": arguments.base_url} if arguments.model else None
    implementation = "llm_agent" if arguments.model else arguments.agent  # upstream's names, where it has one
    if arguments.solo:
        implementation += "_solo"
    return {
        "num_trials": arguments.trials,
        "max_steps": env.max_steps,
        "max_errors": env.max_errors,
        "seed": arguments.seed,
        "agent": {"implementation": implementation, "llm": arguments.model, "llm_args": agent_args},
        "user": {
            "implementation": "scripted" if arguments.user == "scripted" else "user_simulator",
            "llm": None if arguments.user == "scripted" else arguments.user,
            "llm_args": None,
        },
    }


def _finished(path: Path, info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversations of an earlier run of the same settings, its infrastructure failures left out."""
    document = json.loads(path.read_text())
    before = document["info"]
    same = all(before[key] == info[key] for key in ("max_steps", "max_errors", "seed"))
    same &= before["agent_info"] == info["agent"] and all(before["user_info"][k] == v for k, v in info["user"].items())
    if not same:
        raise SystemExit(f"{path} holds conversations of other settings: give another --out, or remove it")
    return [run for run in document["simulations"] if not run["skipped"]]


def pass_hat(successes: Mapping[str, Sequence[bool]], k: int) -> float | None:
    """pass^k (Yao et al., 2024, arXiv:2406.12045): the chance that k trials of a task all succeed, over all tasks.

    None where a task has fewer than k trials.
    """
    if not successes or min(map(len, successes.values())) < k:
        return None
    shares = [math.comb(sum(runs), k) / math.comb(len(runs), k) for runs in successes.values()]
    return sum(shares) / len(shares)


def summarise(domain: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row of the table: pass^k with a 95% interval over tasks, then what it took."""
    scored = [run for run in runs if not run["skipped"]]
    successes: dict[str, list[bool]] = defaultdict(list)
    for run in scored:
        successes[run["task_id"]].append(abs(run["reward_info"]["reward"] - 1) <= 1e-6)
    cells = [domain, f"{len(successes)} x {max(map(len, successes.values()), default=0)}", str(len(runs) - len(scored))]
    for k in range(1, 5):
        share = pass_hat(successes, k)
        if share is None:
            cells.append("")
            continue
        low, high = wilson_interval(share * len(successes), len(successes))  # tasks are the independent draws
        cells.append(f"{share:.3f} [{low:.3f}, {high:.3f}]")
    messages = [message for run in scored for message in run["messages"]]
    counts = [m["usage"] or {} for m in messages if m["role"] != "tool"]
    tokens = [sum(count.get(kind, 0) for count in counts) for kind in ("prompt_tokens", "completion_tokens")]
    costs = [run["agent_cost"] for run in scored if run["agent_cost"] is not None]
    return [*cells, f"{tokens[0]:,} + {tokens[1]:,}", f"${sum(costs):.2f}" if costs else "unpriced"]


def print_table(rows: Sequence[Sequence[str]], title: str) -> None:
    names = ("domain", "tasks x trials", "failed", "pass^1", "pass^2", "pass^3", "pass^4", "tokens in + out", "cost")
    table = Table(*names, title=title, title_justify="left", box=None)
    for row in rows:
        table.add_row(*row)
    for model, scores in _PUBLISHED.items():
        for domain, score in scores.items():
            if any(row[0] == domain for row in rows):
                table.add_row(domain, f"published: {model}", "", f"{score / 100:.3f}", style="dim")
    console = Console(width=160)
    console.print(table)
    console.print(f"published figures: {_SOURCE}; they are with a model as the user", style="dim", highlight=False)


def print_rescored(path: str) -> int:
    """Score a results file again, upstream's or ours, beside what it says."""
    read = read_results(path)
    verdicts = rescore(read)
    differ = [
        (run.task_id, run.trial, run.reward_info.reward, verdict.reward)
        for run, verdict in zip(read.simulations, verdicts, strict=True)
        if run.reward_info is not None and not run.skipped and run.reward_info.reward != verdict.reward
    ]
    print(f"{path}: {len(verdicts)} conversations scored again, {len(differ)} rewards differ")
    for task_id, trial, before, now in differ:
        print(f"  {task_id}, trial {trial}: {before} in the file, {now} now")
    return 1 if differ else 0


def _user_endpoint(arguments: argparse.Namespace) -> tuple[str | None, str]:
    return arguments.user_base_url, arguments.user_api_key_env


async def run(arguments: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        agent: Agent
        if arguments.agent == "gold":
            agent = gold_agent
        elif arguments.agent == "nop":
            agent = idle_agent
        elif arguments.base_url is not None:
            model = OpenAIModel(
                arguments.model, base_url=arguments.base_url, api_key_env=arguments.api_key_env,
                temperature=arguments.temperature,
            )  # fmt: skip
            agent = endpoint_agent(model)
        else:
            local = local_agent(
                arguments.model, tool_template=arguments.tool_template, temperature=arguments.temperature,
                max_length=arguments.max_length, max_turns=arguments.max_turns, seed=arguments.seed,
            )  # fmt: skip
            agent = await stack.enter_async_context(local)
        domains = arguments.domain.split(",")
        rows = [summarise(domain, await run_domain(domain, agent, arguments)) for domain in domains]
    print_table(rows, f"τ²-bench, agent {arguments.model or arguments.agent}, user {arguments.user}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--domain", default="mock", help=f"one or several, with commas between, of {', '.join(DOMAINS)}")
    add("--split", default="base", help="base, the benchmark's own; or train, test, small, full")
    add("--agent", choices=("gold", "nop", "model"), help="default: model")
    add("--model", help="'smollm2', a Hugging Face folder, or the name of a model at --base-url")
    add("--base-url", help="an OpenAI-compatible endpoint")
    add("--api-key-env", default="OPENAI_API_KEY")
    add("--temperature", type=float, default=0.0)
    add("--tool-template", default="hermes", help="for local models whose template knows no tools")
    add("--max-length", type=int, default=8192, help="context of a local model, in tokens")
    add("--user", default="scripted", help="'scripted', or the name of a model")
    add("--user-base-url")
    add("--user-api-key-env", default="OPENAI_API_KEY")
    add("--solo", action="store_true", help="no user: the agent works on the ticket alone (telecom and mock)")
    add("--trials", type=int, default=1)
    add("--tasks", type=int, help="the first so many of the split")
    add("--max-turns", type=int, default=200)
    add("--concurrency", type=int, default=8)
    add("--seed", type=int, default=300)
    add("--price", type=float, nargs=2, metavar=("IN", "OUT"), help="the agent's dollars per million tokens")
    add("--out", help="folder of the results files; default runs/tau2/<agent>")
    add("--rescore", metavar="FILE", help="score a results file again and play nothing")
    arguments = parser.parse_args()
    if arguments.rescore:
        return print_rescored(arguments.rescore)
    arguments.agent = arguments.agent or ("model" if arguments.model else "gold")
    if (arguments.agent == "model") != (arguments.model is not None):
        parser.error("--model goes with --agent model, and with no other")
    name = (arguments.model or arguments.agent).replace("/", "_")
    arguments.out = arguments.out or f"runs/tau2/{name}{'-solo' if arguments.solo else ''}-{arguments.user}"
    try:
        return asyncio.run(run(arguments))
    except ConfigError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    raise SystemExit(main())
