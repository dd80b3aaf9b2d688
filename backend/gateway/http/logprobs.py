"""Log-probabilities of an answer's tokens, as OpenAI's APIs give them."""

from __future__ import annotations

from typing import Any

from sparring.backend.gateway.request import RecordedReply
from sparring.backend.gateway.session import Session

__all__ = ["token_logprobs"]

_LEAST = -9999.0  # JSON has no infinity


def token_logprobs(session: Session, reply: RecordedReply) -> list[dict[str, Any]]:
    """One entry a sampled token, the end of turn included; under the distribution that it was sampled from."""
    said, chat = reply.completion, session.chat_format(reply.policy_id)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = chat.decode([token_id], special_tokens=True)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}

    alternatives_of = said.top_logprobs or [[] for _ in said.token_ids]
    return [
        entry(token_id, logprob) | {"top_logprobs": [entry(other, value) for other, value in alternatives]}
        for token_id, logprob, alternatives in zip(said.token_ids, said.logprobs, alternatives_of, strict=True)
    ]
