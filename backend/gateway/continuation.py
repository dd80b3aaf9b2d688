"""A request that goes on after an engine aborted it: new weights may interrupt an answer, never shorten it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from sparring.backend.engines.base import Chunk, Completion, Engine, SamplingParams
from sparring.errors import EngineError

__all__ = ["uninterrupted"]


async def uninterrupted(
    engine: Engine, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str
) -> AsyncGenerator[Chunk, None]:
    """As `Engine.stream`; what was sampled before an abort becomes the prompt of the rest."""
    said = Completion([], [], [], "aborted")
    left = sampling
    while True:
        stream = engine.stream([*token_ids, *said.token_ids], left, session_id=session_id)
        rest: Completion | None = None
        async with aclosing(stream):  # type: ignore[type-var]  # each is a generator
            async for chunk in stream:
                rest = chunk.completion
                if chunk.token_ids:
                    yield Chunk(chunk.token_ids)
        if rest is None:
            raise EngineError("the engine's stream ended without its completion")
        said = _joined(said, rest)
        done = len(said.token_ids)
        if said.finish_reason == "aborted" and done < sampling.max_new_tokens:
            # A generator that began anew would repeat its draws, and the rest would depend on what was said before.
            seed = None if sampling.seed is None else sampling.seed + done
            left = replace(sampling, max_new_tokens=sampling.max_new_tokens - done, seed=seed)
            continue
        yield Chunk([], replace(said, finish_reason="length") if said.finish_reason == "aborted" else said)
        return


def _joined(said: Completion, rest: Completion) -> Completion:
    alternatives = None
    if rest.top_logprobs is not None:
        alternatives = [*(said.top_logprobs or []), *rest.top_logprobs]
    return Completion(
        said.token_ids + rest.token_ids,
        said.logprobs + rest.logprobs,
        said.policy_versions + rest.policy_versions,
        rest.finish_reason,
        rest.stop_string,
        alternatives,
    )
