"""What slows the trainer beside busy servers on one GPU: time slices, kernels that wait, or its own interpreter?

The trainer runs steps on batches of GSM8K's shape while servers are kept busy by a client in a process of its own, or
in the trainer's interpreter. Where NVIDIA's MPS runs, servers and trainer are its clients: their kernels run side by
side then, and the trainer may be given the lower priority.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import Row
from benchmarks.gpu import _mps
from benchmarks.gpu._load import Load, raw_load
from benchmarks.gpu._servers import config_of, kept_urls, running

SHAPE, ROW_TOKENS, GROUP, PROMPT, TEMPERATURE = "qwen2.5-0.5b", 16384, 8, 120, 1.0
CONCURRENCY = 512
WARM_S, MEASURE_S, ALONE_S = 2.0, 4.0, 3.0
TIMEOUT_S = 200.0

# Servers by name, whether trainer and servers are clients of MPS, the trainer's MPS priority (1 is below normal), and
# what the trainer's process measures. `default` and `second` are those of `benchmarks.gpu.serve`.
CASES: dict[str, dict[str, Any]] = {
    "time slices": {"mps": False, "priority": 0, "servers": ["plain"], "in_thread": True},
    "MPS": {"mps": True, "priority": 0, "servers": ["default", "second"], "in_thread": False},
    "MPS, trainer below": {
        "mps": True,
        "priority": 1,
        "servers": ["default", "second", "third"],
        "in_thread": False,
    },
}


def measure(out: Path) -> tuple[list[Row], dict[str, Any]]:
    return asyncio.run(_measure(out, Path(os.environ["SPARRING_BENCH_MODEL"])))


async def _measure(out: Path, model: Path) -> tuple[list[Row], dict[str, Any]]:
    """Without kept servers it starts the one that needs no MPS, and leaves the other cases out."""
    details: dict[str, Any] = {}
    rows: list[Row] = []
    async with running(model, "plain", logs=out) as started:
        servers = kept_urls() | started
        for name, case in CASES.items():
            urls = [servers[server] for server in case["servers"] if server in servers]
            if not urls or (case["mps"] and not _mps.running()):
                details[name] = {"skipped": f"servers {case['servers']} are not kept, or MPS does not run"}
                continue
            details[name] = await asyncio.to_thread(_in_own_process, name, case, urls, out)
            rows += _rows(name, details[name])
    return rows, details


def _in_own_process(name: str, case: dict[str, Any], urls: list[str], out: Path) -> dict[str, Any]:
    """Whether a process is a client of MPS, and with which priority, is settled as it starts."""
    environment = dict(os.environ)
    environment.pop("CUDA_MPS_PIPE_DIRECTORY", None)
    if case["mps"]:
        environment |= {"CUDA_MPS_PIPE_DIRECTORY": _mps.PIPES, "CUDA_MPS_CLIENT_PRIORITY": str(case["priority"])}
    file = out / f"sharing-{name.replace(' ', '-')}.json"
    command = [sys.executable, "-m", "benchmarks.gpu.sharing", str(file), json.dumps(case), *urls]
    found = subprocess.run(command, env=environment, timeout=TIMEOUT_S)
    if found.returncode:
        raise RuntimeError(f"{name}: the trainer's process ended with {found.returncode}")
    return dict(json.loads(file.read_text()))


def _rows(name: str, found: dict[str, Any]) -> list[Row]:
    rows = []
    for situation, figures in found.items():
        if not isinstance(figures, dict):
            continue
        if figures["trainer"]:
            rows.append(Row(f"{name}: trainer, {situation}", figures["trainer"], "tokens/s"))
        if figures["sampled"]:
            rows.append(Row(f"{name}: sampled, {situation}", figures["sampled"], "tokens/s"))
    return rows


class _Trainer:
    """Steps of the real trainer's mathematics, packing included, on random weights."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from sparring.backend.objectives import load_objective
        from sparring.backend.objectives.base import Totals
        from sparring.backend.trainer.head import install_head

        torch.manual_seed(0)
        config = config_of(SHAPE)
        with torch.device("cuda"):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        install_head(self.model, torch.bfloat16)
        self._torch = torch
        self._rows = [gsm8k_like(seed, config.vocab_size) for seed in range(4)]
        self._objective = load_objective("default", {})
        self._totals = Totals(tokens=len(self._rows) * ROW_TOKENS, sequences=200, groups=25)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self._next = 0

    def run(self, seconds: float) -> float:
        """Forwarded tokens a second."""
        from sparring.backend.trainer.packing import pack
        from sparring.backend.trainer.step import loss_inputs

        self._torch.cuda.synchronize()
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            row = pack(self._rows[self._next % len(self._rows)]).to("cuda")
            scores = self.model(row=row)
            self._objective.loss(loss_inputs(row, scores, self._totals)).loss.backward()
            self._next += 1
            if self._next % len(self._rows) == 0:
                self._torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
            tokens += row.tokens
            self._torch.cuda.synchronize()
        return tokens / (time.perf_counter() - began)

    def beside(self, *urls: str, in_thread: bool = False) -> dict[str, Any]:
        """The same while servers are busy."""
        if in_thread:
            found: list[Load] = []
            warm = threading.Event()

            def load() -> None:
                found.append(asyncio.run(_load(*urls, on_warm=warm.set)))

            thread = threading.Thread(target=load, daemon=True)
            thread.start()
            if not warm.wait(TIMEOUT_S):
                raise TimeoutError("the load beside the trainer did not begin")
            trained = self.run(MEASURE_S - 0.5)
            thread.join(TIMEOUT_S)
            return {"trainer": trained, "sampled": found[0].tokens_per_s}
        numbers = [str(CONCURRENCY), str(WARM_S), str(MEASURE_S)]
        command = [sys.executable, "-m", "benchmarks.gpu._load", *numbers, *urls]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            trained = self.run(MEASURE_S - 0.5)
            said = json.loads(process.stdout.readline())
        return {"trainer": trained, "sampled": said["tokens_per_s"]}


def gsm8k_like(seed: int, vocabulary: int) -> list[Any]:
    """Samples that fill a row of `ROW_TOKENS`: groups on a common prompt, answers of 265 tokens in the mean."""
    from sparring.backend.trainer.packing import Sample

    rng = np.random.default_rng(seed)
    samples: list[Any] = []
    tokens = 0
    prompt = rng.integers(0, vocabulary, PROMPT)
    while True:
        if len(samples) % GROUP == 0:
            prompt = rng.integers(0, vocabulary, PROMPT)
            tokens += PROMPT
        answer = int(np.clip(rng.normal(265, 80), 60, 400))
        if tokens + answer > ROW_TOKENS:
            return samples
        tokens += answer
        ids = np.concatenate([prompt, rng.integers(0, vocabulary, answer)])
        size = len(ids)
        actions = np.arange(size) >= PROMPT
        logprobs = np.full(size, -np.log(vocabulary), np.float32)
        temperatures = np.full(size, TEMPERATURE, np.float32)
        advantages, lags = rng.standard_normal(size), np.full(size, 2, np.int32)
        samples.append(Sample(ids, actions, logprobs, advantages, lags, temperatures, index=len(samples)))


async def _load(*urls: str, **how: Any) -> Load:
    return await raw_load(*urls, concurrency=CONCURRENCY, warm_s=WARM_S, measure_s=MEASURE_S, **how)


def main(file: Path, case: dict[str, Any], urls: list[str]) -> None:
    """All that one trainer's process measures, written after each figure."""
    found: dict[str, Any] = {"case": json.dumps(case)}

    def note(name: str, figures: dict[str, Any]) -> None:
        found[name] = figures
        file.write_text(json.dumps(found, indent=1))
        print(name, figures, flush=True)

    asyncio.run(_load(*urls))  # kernels compile at first use
    if len(urls) > 1:  # sampling alone, before a trainer has any work
        for n in range(1, len(urls) + 1):
            load = asyncio.run(_load(*urls[:n]))
            note(f"absent, {n} servers busy", {"trainer": 0.0, "sampled": load.tokens_per_s, "load": asdict(load)})
    trainer = _Trainer()
    trainer.run(1.0)
    note("alone", {"trainer": trainer.run(ALONE_S), "sampled": 0.0})
    for n in range(1, len(urls) + 1):
        note(f"{n} servers busy", trainer.beside(*urls[:n]))
    if case["in_thread"]:
        note("1 server busy, client in this interpreter", trainer.beside(urls[0], in_thread=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
