"""Sampling speed of the embedded engine against transformers' `generate`, SmolLM2, same threads, in one run.

    python -m benchmarks.engine [--json FILE] [--threads N] [--dtype bfloat16] [--repeats N]

Groups: 32 requests at once, 4 prompts of 150 tokens for 8 members each, 40 new tokens. `generate` gets the same batch.
Ragged: 32 episodes of two turns arrive over a second, with completions of 8 to 48 tokens and 20 new prompt tokens
between the turns. `generate` takes up to 32 of the turns that wait whenever its last batch is done. The two programs
alternate, so that both see the same machine; ratios are medians over pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from benchmarks._report import Row, report
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.backend.models import resolve_model

_SLOTS, _GROUP, _PROMPT, _NEW = 32, 8, 150, 40
_EPISODES, _ARRIVALS_S, _BETWEEN = 32, 1.0, 20
_TEMPERATURE = 0.7
_GROUPS_BOUND, _RAGGED_BOUND = 2.0, 1.2


@dataclass(frozen=True)
class _Episode:
    """Prompt tokens, then for each turn how many tokens it says; `between` is what the environment answers."""

    prompt: list[int]
    lengths: tuple[int, int]
    between: list[int]
    arrives_s: float


class _Lengths(StoppingCriteria):
    """Ends each row of `generate` at its own length."""

    def __init__(self, prompt: int, lengths: list[int]) -> None:
        self._ends = torch.tensor(lengths) + prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends  # type: ignore[return-value]


def _generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """One static batch, padded on the left; the new tokens of each row, up to its own length."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=_TEMPERATURE, top_k=0, top_p=1.0,
        max_new_tokens=max(lengths), eos_token_id=None, pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([_Lengths(width, lengths)]),
    )  # fmt: skip
    return [row[width : width + length] for row, length in zip(out.tolist(), lengths, strict=True)]


async def _groups_by_engine(engine: TorchEngine, prompts: list[list[int]], new: int) -> int:
    sampling = SamplingParams(max_new_tokens=new, temperature=_TEMPERATURE)
    completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    return sum(len(completion.token_ids) for completion in completions)


async def _groups_by_generate(model: PreTrainedModel, prompts: list[list[int]], new: int) -> int:
    return sum(map(len, _generate(model, prompts, [new] * len(prompts))))


async def _ragged_by_engine(engine: TorchEngine, episodes: list[_Episode]) -> int:
    async def play(number: int, episode: _Episode) -> int:
        await asyncio.sleep(episode.arrives_s)
        prompt = episode.prompt
        for length in episode.lengths:
            sampling = SamplingParams(max_new_tokens=length, temperature=_TEMPERATURE)
            completion = await engine.generate(prompt, sampling, session_id=str(number))
            prompt = [*prompt, *completion.token_ids, *episode.between]
        await engine.release(str(number))
        return sum(episode.lengths)

    return sum(await asyncio.gather(*(play(number, episode) for number, episode in enumerate(episodes))))


async def _ragged_by_generate(model: PreTrainedModel, episodes: list[_Episode]) -> int:
    began = time.perf_counter()
    coming = sorted(episodes, key=lambda episode: episode.arrives_s)
    waiting: list[tuple[_Episode, int, list[int]]] = []
    said = 0
    while coming or waiting:
        while coming and coming[0].arrives_s <= time.perf_counter() - began:
            episode = coming.pop(0)
            waiting.append((episode, 0, episode.prompt))
        if not waiting:
            await asyncio.sleep(coming[0].arrives_s - (time.perf_counter() - began))
            continue
        batch, waiting = waiting[:_SLOTS], waiting[_SLOTS:]
        lengths = [episode.lengths[turn] for episode, turn, _ in batch]
        new = _generate(model, [prompt for _, _, prompt in batch], lengths)
        said += sum(lengths)
        for (episode, turn, prompt), tokens in zip(batch, new, strict=True):
            if turn == 0:
                waiting.append((episode, 1, [*prompt, *tokens, *episode.between]))
    return said


async def _tokens_per_s(program: Callable[[], Awaitable[int]]) -> float:
    began = time.perf_counter()
    tokens = await program()
    return tokens / (time.perf_counter() - began)


async def _measure(folder: Path, threads: int, dtype: str, repeats: int) -> list[Row]:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    engine = TorchEngine(folder, slots=_SLOTS, max_length=512, dtype=dtype, device="cpu", threads=threads)
    await engine.start()
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(model.config.vocab_size) for _ in range(count)]

    speeds: dict[str, list[float]] = {name: [] for name in ("groups", "groups by generate", "ragged",
                                                            "ragged by generate", "occupancy")}  # fmt: skip
    for repeat in range(repeats + 1):
        prompts = [prompt for prompt in (words(_PROMPT) for _ in range(_SLOTS // _GROUP)) for _ in range(_GROUP)]
        shared = [words(_PROMPT) for _ in range(_EPISODES // _GROUP)]
        episodes = [
            _Episode(shared[number // _GROUP], (rng.randint(8, 48), rng.randint(8, 48)), words(_BETWEEN),
                     rng.uniform(0, _ARRIVALS_S))
            for number in range(_EPISODES)
        ]  # fmt: skip

        new = _NEW if repeat else 4  # the first round warms both up

        measured = {
            "groups": await _tokens_per_s(partial(_groups_by_engine, engine, prompts, new)),
            "groups by generate": await _tokens_per_s(partial(_groups_by_generate, model, prompts, new)),
        }
        if not repeat:
            continue
        before = await engine.stats()
        measured["ragged"] = await _tokens_per_s(partial(_ragged_by_engine, engine, episodes))
        after = await engine.stats()
        measured["occupancy"] = (after["occupied_rows"] - before["occupied_rows"]) / (after["steps"] - before["steps"])
        measured["ragged by generate"] = await _tokens_per_s(partial(_ragged_by_generate, model, episodes))
        for name, value in measured.items():
            speeds[name].append(value)
    await engine.stop()

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(speeds[name], speeds[f"{name} by generate"], strict=True))

    def median(name: str) -> float:
        return statistics.median(speeds[name])

    return [
        Row("groups of 8, engine", median("groups"), "tokens/s"),
        Row("groups of 8, generate", median("groups by generate"), "tokens/s"),
        Row("groups of 8, engine / generate", ratio("groups"), "x", _GROUPS_BOUND),
        Row("ragged two turns, engine", median("ragged"), "tokens/s"),
        Row("ragged two turns, generate", median("ragged by generate"), "tokens/s"),
        Row("ragged two turns, engine / generate", ratio("ragged"), "x", _RAGGED_BOUND),
        Row(f"ragged two turns, rows a step of {_SLOTS}", median("occupancy"), "rows"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows = asyncio.run(_measure(resolve_model("smollm2"), arguments.threads, arguments.dtype, arguments.repeats))
    title = f"Embedded engine, SmolLM2-135M, {arguments.dtype}, {arguments.threads} thread(s)"
    return report(title, rows, arguments.json, vars(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
