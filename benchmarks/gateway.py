"""What the gateway adds to a request, beside LiteLLM's proxy over the same engine, which answers at once.

    python -m benchmarks.gateway [--litellm PATH/TO/litellm] [--json FILE] [--soak REQUESTS]

Each server has a process of its own on one processor, the client another; rounds alternate, so that all see the same
machine. The gateway's figure is the whole request (template, tokens, recording). LiteLLM's is what it adds to the bare
server behind it. `litellm[proxy]` may live in any virtual environment; without --litellm its rows are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks._gateway_parts import ADMIN_KEY, ANSWER, Connection, Served, free_port, serve
from benchmarks._report import Row, report

_RATE = 100.0  # requests a second
_ROUNDS, _ROUND_S = 3, 4.0
_CLIENTS = 16
_TURNS = 5  # an episode
_MEDIAN_MS, _P95_MS, _SPEEDUP, _GROWTH = 2.0, 5.0, 3.0, 1.1
_TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@asynccontextmanager
async def _episode(connection: Connection, server: str) -> AsyncIterator[str]:
    """A key for the next few requests: with the gateway, that of a session which is exported in the end."""
    if server != "gateway":
        yield "x"
        return
    _, raw = await connection.request("POST", "/rl/start_session", {"task_id": "benchmark"}, ADMIN_KEY)
    session = json.loads(raw)
    yield session["api_key"]
    await connection.request("POST", "/rl/end_session", None, session["api_key"])
    exported = {"session_id": session["session_id"], "style": "concat"}
    status, _ = await connection.request("POST", "/export_trajectories", exported, ADMIN_KEY)
    if status != 200:
        raise SystemExit(f"export answered {status}")


async def _ask(connection: Connection, key: str, turn: int) -> float:
    """Milliseconds of one request of a conversation that has had `turn` turns."""
    messages = [{"role": "system", "content": "You solve problems with a calculator."}]
    for _ in range(turn):
        messages += [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": ANSWER}]
    messages.append({"role": "user", "content": "How many?"})
    body = {"model": "policy", "messages": messages, "tools": [_TOOL]}
    start = time.perf_counter()
    status, raw = await connection.request("POST", "/v1/chat/completions", body, key)
    took = 1e3 * (time.perf_counter() - start)
    if status != 200 or json.loads(raw)["choices"][0]["message"]["content"] != ANSWER:
        raise SystemExit(f"a request was answered {status}: {raw[:300]!r}")
    return took


async def _paced(port: int, server: str) -> list[float]:
    """Latencies at a steady rate, whatever the server does: each request has a time at which it is due."""
    loop = asyncio.get_running_loop()
    begin, due = loop.time(), 0
    latencies: list[float] = []

    async def client() -> None:
        nonlocal due
        async with Connection(port) as connection:
            while True:
                async with _episode(connection, server) as key:
                    for turn in range(_TURNS):
                        at, due = begin + due / _RATE, due + 1
                        if at > begin + _ROUND_S:
                            return
                        await asyncio.sleep(max(0.0, at - loop.time()))
                        latencies.append(await _ask(connection, key, turn))

    await asyncio.gather(*(client() for _ in range(8)))
    return latencies


async def _saturated(port: int, server: str, seconds: float = _ROUND_S, limit: int | None = None) -> float:
    """Requests a second with several clients that wait for nothing; sessions of the gateway not counted."""
    begin, done = time.perf_counter(), 0

    async def client() -> None:
        nonlocal done
        async with Connection(port) as connection:
            while done < limit if limit else time.perf_counter() - begin < seconds:
                async with _episode(connection, server) as key:
                    for turn in range(_TURNS):
                        await _ask(connection, key, turn)
                        done += 1

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return done / (time.perf_counter() - begin)


async def _soak(gateway: Served, requests: int) -> list[Row]:
    """Memory over many requests, and what is left of them."""
    await _saturated(gateway.port, "gateway", limit=requests // 10)
    before, descriptors, tasks = gateway.resident_mib, gateway.descriptors, await _tasks(gateway)
    await _saturated(gateway.port, "gateway", limit=requests - requests // 10)
    async with Connection(gateway.port) as connection:
        _, raw = await connection.request("GET", "/health")
        left = json.loads(raw)
        now = await _tasks(gateway)
        return [
            Row(f"memory after {requests:,} requests, of a tenth's", gateway.resident_mib / before, "x", _GROWTH, True),
            Row("resident memory", gateway.resident_mib, "MiB"),
            Row("sessions open and requests running at the end", left["sessions"] + left["running"], "", 0, True),
            Row("descriptors more than before", max(0, gateway.descriptors - 1 - descriptors), "", 0, True),
            Row("tasks more than before", max(0, now - tasks), "", 0, True),
        ]


async def _tasks(gateway: Served) -> int:
    """Tasks of the server's event loop."""
    async with Connection(gateway.port) as connection:
        _, page = await connection.request("GET", "/metrics")
    return int(float(page.decode().partition("\nsparring_tasks ")[2].split()[0]))


def _litellm_command(executable: str, port: int, upstream: int, folder: str) -> list[str]:
    parameters = {"model": "openai/policy", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "x"}
    config = Path(folder) / "litellm.json"  # YAML reads JSON
    config.write_text(json.dumps({"model_list": [{"model_name": "policy", "litellm_params": parameters}]}))
    options = ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    # Without keys, as it is quickest; its own port is open on the loopback device alone.
    permit = "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true"
    environ = ["LITELLM_LOG=ERROR", "LITELLM_MODE=PRODUCTION", permit]
    return ["env", *environ, executable, "--config", str(config), *options]


async def _measure(litellm: str | None, soak: int) -> tuple[list[Row], dict[str, Any]]:
    part = [sys.executable, "-m", "benchmarks._gateway_parts"]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        async def start(command: list[str], port: int, path: str, cpu: int) -> Served:
            return await stack.enter_async_context(serve(command, port, path, cpu))

        port = free_port()
        servers = {"gateway": await start([*part, "gateway", str(port)], port, "/health", 0)}
        if litellm:
            port, upstream = free_port(), free_port()
            servers["stub"] = await start([*part, "stub", str(upstream)], upstream, "/", 1)
            command = _litellm_command(litellm, port, upstream, folder)
            servers["litellm"] = await start(command, port, "/health/liveliness", 0)
        latencies: dict[str, list[float]] = {name: [] for name in servers}
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for name, server in servers.items():
            await _saturated(server.port, name, seconds=1.0)  # warm up
        costs: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(_ROUNDS):
            for name, server in servers.items():
                latencies[name] += await _paced(server.port, name)
                used, begin = server.processor_s, time.perf_counter()
                rates[name].append(await _saturated(server.port, name))
                requests = rates[name][-1] * (time.perf_counter() - begin)
                costs[name].append(1e3 * (server.processor_s - used) / requests)
        rows = _rows(latencies, rates, costs)
        if soak:
            rows += await _soak(servers["gateway"], soak)
        paced = {name: len(values) for name, values in latencies.items()}
        return rows, {"rates": rates, "costs": costs, "paced_requests": paced}


def _rows(
    latencies: dict[str, list[float]], rates: dict[str, list[float]], costs: dict[str, list[float]]
) -> list[Row]:
    median, p95 = _percentiles(latencies["gateway"])
    rate = statistics.median(rates["gateway"])
    bound_median, bound_p95, least_rate = _MEDIAN_MS, _P95_MS, None
    rows = []
    if "litellm" in latencies:
        base_median, base_p95 = _percentiles(latencies["stub"])
        other_median, other_p95 = _percentiles(latencies["litellm"])
        other_rate = statistics.median(rates["litellm"])
        rows = [
            Row("LiteLLM's proxy, added, median", other_median - base_median, "ms"),
            Row("LiteLLM's proxy, added, p95", other_p95 - base_p95, "ms"),
            Row("LiteLLM's proxy, saturated", other_rate, "requests/s"),
            Row("LiteLLM's proxy, processor time a request", statistics.median(costs["litellm"]), "ms"),
            Row("the bare server behind it, median", base_median, "ms"),
        ]
        # At most two milliseconds, or at most half of what LiteLLM adds on this machine.
        bound_median = max(bound_median, (other_median - base_median) / 2)
        bound_p95 = max(bound_p95, (other_p95 - base_p95) / 2)
        least_rate = _SPEEDUP * other_rate
    return [
        Row(f"gateway at {_RATE:g} requests/s, whole request, median", median, "ms", bound_median, at_most=True),
        Row(f"gateway at {_RATE:g} requests/s, whole request, p95", p95, "ms", bound_p95, at_most=True),
        Row("gateway, saturated, one processor", rate, "requests/s", least_rate),
        Row("gateway, processor time a request", statistics.median(costs["gateway"]), "ms"),
        *rows,
    ]


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=20)[18]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", help="the executable of litellm[proxy]")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--soak", type=int, default=0, help="requests over which memory is watched")
    arguments = parser.parse_args()
    rows, details = asyncio.run(_measure(arguments.litellm, arguments.soak))
    return report("Gateway", rows, arguments.json, details)


if __name__ == "__main__":
    raise SystemExit(main())
