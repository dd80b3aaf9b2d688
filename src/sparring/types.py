"""The vocabulary of the whole project: frozen dataclasses without behaviour of their own, and without torch.

A `Trajectory` is one episode. It holds `TokenSequence`s, exactly as sampled; a `Group` holds the trajectories of one
task under one environment seed. `encode_trajectory` and `decode_trajectory` are their one stored form.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "AGENT_HEADER",
    "EPISODE_STATES",
    "SCHEMA_VERSION",
    "ChatClient",
    "ChatReply",
    "EpisodeResult",
    "EpisodeSpec",
    "Failure",
    "Group",
    "Message",
    "RunEpisode",
    "StopReason",
    "TokenSequence",
    "ToolCall",
    "Trajectory",
    "Turn",
    "Usage",
    "decode_trajectory",
    "encode_trajectory",
]

AGENT_HEADER = "x-sparring-agent"  # in requests to the gateway: names the agent that speaks, where there are several
# Of a stored trajectory.
EPISODE_STATES = ("pending", "consumed", "dropped", "expired", "failed", "evaluation", "probe")
SCHEMA_VERSION = 2
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool. `arguments` is the JSON text as the model wrote it, parsed or not."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Message:
    """One chat message in OpenAI's format. `reasoning` is a thinking block that the model's format sets apart."""

    role: Role
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """The message as the JSON object of the chat completions API; absent fields are left out."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


@dataclass(frozen=True)
class Usage:
    """Tokens that an episode or a request cost. `turns` counts model calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    turns: int = 0


@dataclass(frozen=True)
class ChatReply:
    """What a model answered to one chat request.

    Attributes:
        message: the assistant message, tool calls and reasoning parsed out of its text.
        text: the raw text as sampled, special tokens left out: what a text-only environment would be stepped with.
        finish_reason: "stop", "tool_calls" or "length", as in the chat completions API.
        interaction_id: names this turn within its session, for rewards given to single turns.
    """

    message: Message
    text: str
    finish_reason: str
    usage: Usage = Usage()
    interaction_id: str = ""


class ChatClient(Protocol):
    """One session of the gateway, as an agent inside this process sees it.

    `base_url` and `api_key` name the same session over HTTP; `base_url` is None where the HTTP face is not running.
    """

    @property
    def base_url(self) -> str | None: ...

    @property
    def api_key(self) -> str: ...

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        agent_id: str = "main",
        max_new_tokens: int | None = None,
    ) -> ChatReply:
        """Sample the next assistant message. `tools` are JSON schemas as in the chat completions API.

        Raises:
            BudgetExhausted: the session's turn or token budget ran out.
            EngineError: the engine failed.
        """
        ...


class StopReason(StrEnum):
    """Why an episode ended. Budgets that ran out are truncations and are trained; a deadline is a failure."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    DEADLINE = "deadline"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Failure:
    """An infrastructure failure: never a reward. `kind` is a `SparringError.kind`, or "deadline"."""

    kind: str
    message: str


@dataclass(frozen=True)
class Turn:
    """One model call inside a `TokenSequence`: its action tokens are `[start, end)`.

    Attributes:
        agent_id: which agent of the episode spoke.
        policy_id: which policy sampled; turns of frozen policies carry no action mask.
        temperature: the sampling temperature, which divides the logits in the loss too.
        anchor: key of the environment state before the turn (GiGPO groups turns by it), or None.
    """

    start: int
    end: int
    agent_id: str = "main"
    policy_id: str = "policy"
    finish_reason: str = "stop"
    temperature: float = 1.0
    anchor: str | None = None


def _frozen_array(values: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    array: NDArray[Any] = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


_ARRAYS = {
    "token_ids": np.dtype("<i8"),
    "action_mask": np.dtype("?"),
    "behaviour_logprobs": np.dtype("<f4"),
    "policy_versions": np.dtype("<i4"),
}


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """A conversation as the model saw it and sampled it, token for token. All arrays have length T.

    Attributes:
        token_ids: int64.
        action_mask: bool; True where the trained policy sampled the token, False on prompt and tool tokens.
        behaviour_logprobs: float32; log-probability under the distribution the token was sampled from, 0 elsewhere.
        policy_versions: int32; version of the weights that sampled the token, -1 elsewhere.
        turns: the model calls, in order, not overlapping.

    Raises:
        ValueError: lengths differ, or a turn lies outside the sequence.
    """

    token_ids: NDArray[np.int64]
    action_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    turns: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            object.__setattr__(self, name, _frozen_array(getattr(self, name), dtype))
        lengths = {name: getattr(self, name).shape for name in _ARRAYS}
        if any(shape != (len(self.token_ids),) for shape in lengths.values()):
            raise ValueError(f"a token sequence needs four flat arrays of one length, got shapes {lengths}")
        end = 0
        for turn in self.turns:
            if not end <= turn.start <= turn.end <= len(self.token_ids):
                raise ValueError(f"{turn} does not follow token {end} of a sequence of {len(self.token_ids)} tokens")
            end = turn.end

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSequence):
            return NotImplemented
        return self.turns == other.turns and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("token_ids", "action_mask", "behaviour_logprobs", "policy_versions")
        )

    __hash__ = None  # type: ignore[assignment]  # arrays do not hash

    @cached_property  # asked at every batch for all that is ready
    def version_span(self) -> tuple[int, int] | None:
        """Versions of the oldest and the newest action token, or None where the trained policy sampled none."""
        versions = self.policy_versions[self.action_mask]
        return (int(versions.min()), int(versions.max())) if versions.size else None


@dataclass(frozen=True)
class EpisodeSpec:
    """What to play: one member of a group. The members of a group differ by sampling alone."""

    episode_id: str
    group_id: str
    env_id: str
    task_id: str
    seed: int
    split: str = "train"
    attempt: int = 0


@dataclass(frozen=True)
class EpisodeResult:
    """What playing gave, the tokens aside: the environment's reward, or a failure and no reward at all.

    Raises:
        ValueError: a failed episode with a reward, or a finished one without.
    """

    stop_reason: StopReason
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None

    def __post_init__(self) -> None:
        if (self.failure is None) == (self.reward is None):
            raise ValueError(f"an episode has either a reward or a failure, not {self.reward} and {self.failure}")


RunEpisode: TypeAlias = Callable[[EpisodeSpec, ChatClient], Awaitable[EpisodeResult]]
"""Plays one episode. What the agents' room makes and the rollout worker calls, neither importing the other."""


@dataclass(frozen=True)
class Trajectory:
    """One episode, as stored and as trained. A failed one is data too: stored, counted, masked out of the loss.

    Attributes:
        sequences: one, unless the client rewrote its history (a sub-agent, a compaction).
        reward: None where the episode failed; never 0 for want of one.
        reward_parts: named parts of the reward, for display.
        turn_rewards: reward of each environment turn, for turn-level credit; empty where there are none.
        agent_rewards: reward by agent id where agents of one episode are rewarded apart; empty: all get `reward`.
        started_at, finished_at: seconds since the epoch.
    """

    episode_id: str
    group_id: str
    env_id: str
    task_id: str
    seed: int
    sequences: tuple[TokenSequence, ...]
    reward: float | None
    stop_reason: StopReason
    split: str = "train"
    attempt: int = 0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    usage: Usage = Usage()
    messages: tuple[Mapping[str, Any], ...] = ()
    started_at: float = 0.0
    finished_at: float = 0.0
    schema_version: int = SCHEMA_VERSION

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest action token of all sequences, or None where there is none."""
        return min((span[0] for s in self.sequences if (span := s.version_span) is not None), default=None)

    @property
    def action_tokens(self) -> int:
        return sum(int(s.action_mask.sum()) for s in self.sequences)


@dataclass(frozen=True)
class Group:
    """The trajectories of one task under one environment seed; advantages are relative to their mean."""

    group_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def survivors(self) -> tuple[Trajectory, ...]:
        """The members that did not fail: those that train."""
        return tuple(t for t in self.trajectories if not t.failed)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The stored form: JSON, compressed. Arrays are their bytes, little-endian, in base64: as decimal numbers they
    would cost the loop of a thousand episodes seven times as long, and be larger."""
    document = json.dumps(_plain(trajectory), default=_plain, allow_nan=False, separators=(",", ":"))
    return zlib.compress(document.encode(), level=1)


def decode_trajectory(data: bytes) -> Trajectory:
    """Inverse of `encode_trajectory`.

    Raises:
        ValueError: the bytes are damaged, or of a schema that this version does not know.
    """
    try:
        document = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(f"a stored trajectory is damaged: {error}") from error
    if document["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"trajectory schema {document['schema_version']}, this version reads {SCHEMA_VERSION}")
    return Trajectory(
        **{
            **document,
            "sequences": tuple(_decode_sequence(s) for s in document["sequences"]),
            "stop_reason": StopReason(document["stop_reason"]),
            "turn_rewards": tuple(document["turn_rewards"]),
            "failure": Failure(**document["failure"]) if document["failure"] else None,
            "usage": Usage(**document["usage"]),
            "messages": tuple(document["messages"]),
        }
    )


def _plain(value: Any) -> Any:
    """One level of what JSON does not know; `dataclasses.asdict` would copy every array and message first."""
    if isinstance(value, np.ndarray):
        return base64.b64encode(value.tobytes()).decode("ascii")
    if isinstance(value, Mapping):
        return dict(value)
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _decode_sequence(document: Mapping[str, Any]) -> TokenSequence:
    turns: Sequence[Mapping[str, Any]] = document["turns"]
    arrays: dict[str, Any] = {
        name: np.frombuffer(base64.b64decode(document[name]), dtype) for name, dtype in _ARRAYS.items()
    }
    return TokenSequence(**arrays, turns=tuple(Turn(**turn) for turn in turns))
