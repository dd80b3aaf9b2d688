"""vLLM's `/inference/v1/generate`, tokens in and tokens out, as pure functions: what is asked, and what it means.

The server must run with `--logprobs-mode processed_logprobs`: then the log-probability of a token is that under the
distribution it was sampled from, after temperature, top-k, top-p and min-p; of a greedy one, that of temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.backend.engines.base import FinishReason
from sparring.backend.engines.remote.reply import Leg, Reply, refusal
from sparring.errors import EngineError

__all__ = ["IMPOSSIBLE", "generate_body", "parse_answer", "request_id", "version_of"]

IMPOSSIBLE = -9999.0  # vLLM's number for a log-probability of minus infinity, which JSON lacks
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


def request_id(rid: str) -> str:
    """What vLLM calls the request that was sent as `rid`."""
    return f"generate-tokens-{rid}"


def generate_body(leg: Leg, *, stream: bool) -> dict[str, Any]:
    """The JSON of one request."""
    sampling = leg.sampling
    params: dict[str, Any] = {
        "max_tokens": leg.room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # the model's end of turn is among the stop tokens, and no other ends a turn
        "logprobs": sampling.top_logprobs,  # the sampled token's comes in any case
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    return {
        "request_id": leg.rid,
        "token_ids": leg.token_ids,
        "sampling_params": params,
        "cache_salt": leg.cache_salt,
        "stream": stream,
    }


def parse_answer(data: Mapping[str, Any], leg: Leg, before: Reply) -> Reply:
    """The cumulative reply, of a whole answer or of one event of a stream, whose events give what is new.

    Raises:
        EngineError: the server refused, or its answer lacks what training needs.
    """
    choices = data.get("choices")
    if not choices:
        raise EngineError(f"vLLM refused a request: {refusal(data) or str(data)[:500]}")
    (choice,) = choices
    token_ids: list[int] = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(token_ids):
        raise EngineError(
            f"vLLM gave {len(content)} log-probabilities for {len(token_ids)} tokens, and they cannot be had later"
        )
    logprobs = [entry["logprob"] for entry in content]
    if any(logprob is None or logprob != logprob or logprob <= IMPOSSIBLE for logprob in logprobs):
        raise EngineError("vLLM reported a sampled token as impossible: are the weights finite?")
    reason = choice.get("finish_reason")
    if reason is not None and reason not in _FINISH:
        raise EngineError(f"vLLM ended a request for a reason that is not ours: {reason!r}")
    stop = choice.get("stop_reason")
    count = leg.sampling.top_logprobs
    return Reply(
        token_ids=before.token_ids + token_ids,
        logprobs=before.logprobs + logprobs,
        versions=_versions(choice.get("weight_versions")),
        finish_reason=_FINISH[reason] if reason is not None else None,
        stop_string=stop if isinstance(stop, str) else None,
        top_logprobs=(before.top_logprobs or []) + [_alternatives(entry, count) for entry in content]
        if count
        else None,
    )


def version_of(label: str) -> int:
    """Our version of weights that the server calls `label`; 0 for a name that is none of ours."""
    return int(label) if label.isdecimal() else 0


def _versions(spans: list[dict[str, Any]] | None) -> list[int] | None:
    if spans is None:  # every event of a stream but the last
        return None
    return [version_of(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


def _alternatives(entry: Mapping[str, Any], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest; the server puts the sampled token before them where it is not among them."""
    ranked = [each for each in entry["top_logprobs"] if each["logprob"] > IMPOSSIBLE]
    ranked.sort(key=lambda each: -each["logprob"])
    return [(each["token_id"], each["logprob"]) for each in ranked[:count]]
