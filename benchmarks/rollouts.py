"""How many GSM8K episodes a second the rollout loop plays, alone and beside a trainer that shares its interpreter.

    python -m benchmarks.rollouts --json benchmarks/results/rollouts.json

Everything is what a run has (environment, gateway, recorder, SGLang engine over HTTP, scheduler, durable buffer) but
for two stand-ins. The server, a process of its own, answers after 0.5 to 2 s with a worked solution from the data set,
right in half of the cases; so with 40 groups of 8 (`--groups`) at most 256 episodes a second can come, and with 128
the loop is what binds. The trainer is a thread that does what one on a GPU does to the interpreter: it calls one tiny
operation of PyTorch after another, each of which lets go of the interpreter's lock and asks for it again; batches are
taken as soon as they are whole. `--switch` compares intervals after which Python makes a thread hand over (see
`backend/rollout/loop.py`), in turn in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._gateway_parts import free_port
from benchmarks._report import Row, report

CONFIG = "examples/gsm8k_h200.yaml"
_LATENCY_S = (0.5, 2.0)
_WARM_UP_S = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=40, help="that run at once: how busy the loop is kept")
    parser.add_argument("--switch", type=float, nargs="*", default=[], help="intervals in seconds, besides our own")
    parser.add_argument("--json", dest="json_path")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return _serve(arguments.serve)
    import torch

    torch.set_num_threads(1)
    cases: list[tuple[str, bool, float | None]] = [("alone", False, None), ("beside a trainer", True, None)]
    cases += [(f"beside a trainer, {s * 1000:g} ms", True, s) for s in arguments.switch]
    found: dict[str, list[Measured]] = {name: [] for name, _, _ in cases}
    with _server() as url:
        alone = _trainer_alone(arguments.seconds / 2)
        for _ in range(arguments.rounds):
            for name, busy, switch in cases:
                found[name].append(_measure(url, arguments.seconds, arguments.groups, busy=busy, switch=switch))
    rows = []
    for name, busy, _ in cases:
        median = Measured(*map(statistics.median, zip(*found[name], strict=True)))
        rows.append(Row(f"{name}: episodes", median.episodes_per_s, "/s"))
        rows.append(Row(f"{name}: processor time of the loop, an episode", 1000 * median.loop_s, "ms"))
        if busy:
            rows.append(Row(f"{name}: what the trainer keeps of its calls", 100 * median.calls_per_s / alone, "%"))
    title = f"rollouts, {arguments.groups} groups of 8 at once"
    return report(title, rows, arguments.json_path, {"found": found, "trainer_alone_calls_per_s": alone})


class Measured(NamedTuple):
    """`loop_s`: seconds on a processor that the loop's thread spent on an episode."""

    episodes_per_s: float
    calls_per_s: float
    loop_s: float


class _Trainer(threading.Thread):
    """Calls small operations until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls, self.stopping = 0, False

    def run(self) -> None:
        import torch

        weights = torch.zeros(64)
        while not self.stopping:
            for _ in range(50):
                weights.add_(1.0)
            self.calls += 50


def _trainer_alone(seconds: float) -> float:
    trainer = _Trainer()
    trainer.start()
    time.sleep(seconds)
    trainer.stopping = True
    trainer.join()
    return trainer.calls / seconds


def _measure(url: str, seconds: float, groups: int, *, busy: bool, switch: float | None) -> Measured:
    from sparring.backend.buffer import TrajectoryBuffer
    from sparring.backend.gateway import ChatFormat, Recorder
    from sparring.backend.models import resolve_model
    from sparring.backend.rollout import RolloutWorker
    from sparring.config_file import load_config
    from sparring.task_sources import make_episode_runner, make_sampler, open_sources
    from sparring.wiring import make_engine, make_policy, sampling_params

    overrides = ["model.path=smollm2", f'engine.urls=["{url}"]', "rollout.staleness=1000"]
    config = load_config(CONFIG, [*overrides, f"rollout.max_running_groups={groups}"]).config
    sources = open_sources(config)
    with tempfile.TemporaryDirectory() as folder:
        model = resolve_model(config.model.path)
        engine = make_engine(config, model, Path(folder))
        chat = ChatFormat.load(model, tool_template=None, tools=False)
        recorder = Recorder(engine, chat, sampling_params(config), max_length=config.model.max_length)
        buffer = TrajectoryBuffer.open(Path(folder) / "buffer.sqlite")
        worker = RolloutWorker(
            engine=engine,
            recorder=recorder,
            run_episode=make_episode_runner(sources, make_policy(config), config),
            sampler=make_sampler(sources, config),
            config=config.rollout,
            buffer=buffer,
        )
        trainer = _Trainer()
        taking = threading.Event()
        taker = threading.Thread(target=_take, args=(worker, taking), daemon=True)
        try:
            worker.start()
            taker.start()
            if switch is not None:
                sys.setswitchinterval(switch)
            if busy:
                trainer.start()
            time.sleep(_WARM_UP_S)
            before = worker.stats().episodes, trainer.calls, worker.run(_spent(), 60.0), time.monotonic()
            time.sleep(seconds)
            after = worker.stats().episodes, trainer.calls, worker.run(_spent(), 60.0), time.monotonic()
            episodes, calls, spent, took = (b - a for a, b in zip(before, after, strict=True))
            return Measured(episodes / took, calls / took, spent / episodes)
        finally:
            trainer.stopping = True
            taking.set()
            if busy:
                trainer.join()
            taker.join()
            worker.stop()
            buffer.close()


async def _spent() -> float:
    """Seconds on a processor of the thread that runs this."""
    return time.thread_time()


def _take(worker: Any, stop: threading.Event) -> None:
    for version in itertools.count():
        worker.next_batch(version, 600.0)
        worker.update_model_version(version + 1)
        if stop.is_set():
            return


@contextmanager
def _server() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.rollouts", "--serve", str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the stand-in server did not come up")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _serve(port: int) -> int:
    """The endpoints of SGLang that a run needs, over worked solutions of the data set."""
    from aiohttp import web
    from transformers import AutoTokenizer

    from sparring.backend.models import resolve_model

    model = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(model)
    solutions = [json.loads(line) for line in (Path(os.environ["SPARRING_DATA"]) / "gsm8k/train.jsonl").open()]
    answers = {_start(row["question"]): row["answer"].rpartition("####")[2].strip() for row in solutions}
    encoded = [tokenizer.encode(row["answer"].partition("####")[0])[:150] for row in solutions[:500]]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chance = random.Random(0)

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        question = tokenizer.decode(body["input_ids"]).rpartition("<|im_start|>user\n")[2]
        right = answers.get(_start(question), "0") if chance.random() < 0.5 else "-1"
        tokens = [*chance.choice(encoded), *tokenizer.encode(f"#### {right}"), end]
        await asyncio.sleep(chance.uniform(*_LATENCY_S))
        return web.json_response(_reply(tokens[: body["sampling_params"]["max_new_tokens"]]))

    async def info(_request: web.Request) -> web.Response:
        shape = json.loads((model / "config.json").read_text())
        told = {"model_path": str(model), "version": "0.5.17", "weight_version": "default", "dtype": "bfloat16"}
        return web.json_response(told | {"architectures": shape["architectures"]})

    async def fine(_request: web.Request) -> web.Response:
        return web.json_response({"success": True, "status": "ok"})

    app = web.Application()
    app.add_routes([web.get("/model_info", info), web.get("/server_info", info), web.post("/generate", generate)])
    app.add_routes([web.post(path, fine) for path in ("/pause_generation", "/continue_generation", "/abort_request")])
    web.run_app(app, host="127.0.0.1", port=port, print=None)
    return 0


def _start(question: str) -> str:
    return question.strip()[:60]


def _reply(tokens: Sequence[int]) -> dict[str, Any]:
    pairs = [[-0.123456789 * (place % 7), token, None] for place, token in enumerate(tokens)]
    meta = {"finish_reason": {"type": "stop", "matched": tokens[-1]}, "output_token_logprobs": pairs}
    return {"text": "", "output_ids": list(tokens), "meta_info": meta | {"policy_versions": [0] * len(tokens)}}


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    sys.exit(main())
