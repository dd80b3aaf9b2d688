"""What every sampling engine does, whatever is behind it. No torch here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from sparring.errors import EngineError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "EngineHealth",
    "FinishReason",
    "PauseMode",
    "SamplingParams",
    "WeightSource",
]

FinishReason = Literal["stop", "length", "aborted"]
PauseMode = Literal["keep", "abort"]
WeightSource: TypeAlias = "Path | Iterable[tuple[str, torch.Tensor]]"


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion.

    Attributes:
        max_new_tokens: at most so many tokens, the stop token included.
        temperature: 0 is greedy; log-probabilities are then those of temperature 1.
        top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
        stop: strings that end the completion; the tokens that completed the string stay in it.
        stop_token_ids: tokens that end the completion and stay in it, the model's end of turn included.
        seed: a generator of the request's own, so that it repeats whatever runs beside it; None draws one.
        top_logprobs: how many alternatives to report for each token.
    """

    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0


@dataclass(frozen=True)
class Completion:
    """What was sampled. Lists have length T; `policy_versions[i]` is the version of the weights that sampled token i.

    `logprobs` are under the distribution that was sampled from (after temperature, top-k, top-p and min-p).
    `stop_string` is the string of `SamplingParams.stop` that ended it, if one did.
    """

    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason
    stop_string: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class Chunk:
    """New tokens of a running request; the last chunk of a stream carries the whole `Completion`."""

    token_ids: list[int]
    completion: Completion | None = None


@dataclass(frozen=True)
class EngineHealth:
    """`detail` says what is wrong where `ok` is False."""

    ok: bool
    version: int
    running: int
    waiting: int
    detail: str = ""


class Engine(ABC):
    """A sampler of token sequences whose weights can change while requests run.

    Every method is called from one event loop. An engine that dies fails its pending requests with `EngineError`.
    """

    version: int = 0

    @abstractmethod
    async def start(self) -> None:
        """Load and become ready to generate.

        Raises:
            EngineError: with what to do about it.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Fail what is pending and free everything. Idempotent."""

    @abstractmethod
    def stream(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> AsyncIterator[Chunk]:
        """Sample a continuation of `token_ids`, chunk by chunk. Closing the iterator aborts the request.

        `session_id` is a hint that a later request with the same id extends this one: an engine may keep the
        session's keys and values until `release(session_id)`, or until it needs the room.

        Raises:
            EngineError: the prompt does not fit the context, or the engine died.
        """

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        """As `stream`, all at once. Cancelling the caller aborts the request."""
        async for chunk in self.stream(token_ids, sampling, session_id=session_id):
            if chunk.completion is not None:
                return chunk.completion
        raise RuntimeError("a stream ended without its completion")

    async def release(self, session_id: str) -> None:  # noqa: B027  # keeping nothing is a valid engine
        """Forget what was kept for a session. Unknown ids are ignored."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding between two tokens. `keep`: requests wait; `abort`: they end with what they have."""

    async def stage_weights(self, version: int, source: WeightSource) -> WeightSource:
        """Bring weights to where `update_weights` loads them from, while requests still run; returns its source.

        An engine that can do part of the work before the pause overrides this; the source is read once, here.

        Raises:
            EngineError: as `update_weights`.
        """
        return source

    @abstractmethod
    async def update_weights(self, version: int, source: WeightSource) -> None:
        """Load weights from a Hugging Face folder or from named tensors; tokens sampled from then on carry `version`.

        Names are those of `named_parameters()` of the model's `AutoModelForCausalLM`; of an engine with an adapter
        beside its model, those of the adapter's tensors.

        Raises:
            EngineError: a name is unknown or missing, or a shape differs; the old weights then stay.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Go on decoding after `pause`."""

    async def verify_weights(self) -> None:  # noqa: B027  # an engine of this process has nothing to verify
        """See that the engine holds the weights that it was sent last. For when it decodes again: it takes its time.

        Raises:
            EngineError: it does not; nothing more may be sampled from it.
        """

    async def release_memory(self) -> None:
        """Give up the memory of weights and caches until the next `update_weights`. Requests wait from here on.

        Raises:
            EngineError: this engine cannot, or requests are running.
        """
        raise EngineError(f"{type(self).__name__} cannot give its memory up: engine.release_memory is SGLang's")

    @abstractmethod
    async def health(self) -> EngineHealth:
        """Answers within a second, or raises `EngineError`."""
