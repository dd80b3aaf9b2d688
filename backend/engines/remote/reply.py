"""One request to a server, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparring.backend.engines.base import Completion, FinishReason, SamplingParams

__all__ = ["Leg", "Reply", "completion", "joined", "refusal"]


@dataclass(eq=False)
class Leg:
    """One leg of a generation, as the server sees it. A pause may end it; the next leg goes on from what it said.

    Attributes:
        room: at most so many tokens.
        version: of the weights that the server held when it was asked.
        cache_salt: it shares cached prefixes with requests of the same salt alone.
    """

    rid: str
    token_ids: list[int]
    sampling: SamplingParams
    room: int
    version: int
    cache_salt: str
    ended_by_us: bool = False


@dataclass(frozen=True)
class Reply:
    """One answer, or the cumulative state of a streamed one. `versions` is None where the server does not say."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] | None = None
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


def joined(said: Reply, reply: Reply, leg: Leg) -> Reply:
    """What was said before and what this leg says. A server that names no versions held one version all through it."""
    assert said.versions is not None
    versions = reply.versions if reply.versions is not None else [leg.version] * len(reply.token_ids)
    tops = (said.top_logprobs or []) + (reply.top_logprobs or []) if leg.sampling.top_logprobs else None
    return replace(
        reply,
        token_ids=said.token_ids + reply.token_ids,
        logprobs=said.logprobs + reply.logprobs,
        versions=said.versions + versions,
        top_logprobs=tops,
    )


def completion(reply: Reply) -> Completion:
    assert reply.finish_reason is not None
    assert reply.versions is not None
    return Completion(
        token_ids=reply.token_ids,
        logprobs=reply.logprobs,
        policy_versions=reply.versions,
        finish_reason=reply.finish_reason,
        stop_string=reply.stop_string,
        top_logprobs=reply.top_logprobs,
    )


def refusal(answer: Any) -> str | None:
    """Why a server refused, as its JSON says it; None where it did not."""
    error = (answer.get("error") or answer.get("detail")) if isinstance(answer, Mapping) else None
    if not error:
        return None
    return str(error.get("message", error) if isinstance(error, Mapping) else error)[:500]
