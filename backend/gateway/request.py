"""What a client asks for and what it gets, whatever the protocol; and which of its settings a session honours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparring.backend.engines.base import Completion, SamplingParams
from sparring.backend.gateway.schemas import satisfies
from sparring.backend.gateway.served import POLICY
from sparring.errors import GatewayError
from sparring.types import ChatReply, Message

__all__ = ["ChatRequest", "RecordedReply", "TextDelta", "honoured"]

@dataclass(frozen=True)
class ChatRequest:
    """One request for the next assistant message.

    Attributes:
        policy_id: which model answers.
        max_new_tokens: at most so many; None: the session's own limit.
        stop: strings that end the answer and are left out of its content.
        tool_choice: "auto", "none" (a call in the text stays text), "required", or a tool's name.
        one_call: answer with one tool call at most.
        wishes: fields of `SamplingParams` that the client set (temperature, top_p, ...).
        foreign: settings that no engine here knows, by the name that the client gave them.
        json_schema: the answer must be JSON that satisfies it; `{}` is any JSON object, None is any text.
        top_logprobs: how many alternatives to report for each token.
        interaction_id: names the turn, for a client that must know before it is sampled; None draws one.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    agent_id: str = "main"
    policy_id: str = POLICY
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tool_choice: str = "auto"
    one_call: bool = False
    wishes: Mapping[str, Any] | None = None
    foreign: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | None = None
    top_logprobs: int = 0
    interaction_id: str | None = None

    @property
    def constrained(self) -> bool:
        """Whether the client insists on a form that sampling alone may miss."""
        return self.json_schema is not None or self.tool_choice not in ("auto", "none")

    def accepts(self, message: Message) -> bool:
        """Whether an answer has the form that the client insists on."""
        if self.tool_choice not in ("auto", "none"):
            names = {call.name for call in message.tool_calls}
            return bool(names) if self.tool_choice == "required" else self.tool_choice in names
        return self.json_schema is None or bool(message.tool_calls) or satisfies(message.content, self.json_schema)


@dataclass(frozen=True)
class RecordedReply(ChatReply):
    """A reply with the tokens behind it. `stop_string` is the client's stop string that ended it, if one did."""

    policy_id: str = POLICY
    completion: Completion = field(default_factory=lambda: Completion([], [], [], "stop"))
    stop_string: str | None = None


@dataclass(frozen=True)
class TextDelta:
    """Content, or reasoning, that a stream is sure of."""

    text: str
    reasoning: bool = False


def honoured(run: SamplingParams, request: ChatRequest, *, evaluation: bool) -> tuple[SamplingParams, list[str]]:
    """The settings to sample with, and the names of the client's that were replaced.

    A training session samples as the run says, since other settings would bias the ratio of policies; what may end an
    answer early (`stop`, a token limit) is honoured. An evaluation samples as its client says.

    Raises:
        GatewayError: a setting that cannot be met and would change the answer's form, or in evaluation its odds.
    """
    wishes = dict(request.wishes or {})
    limit = run.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    if not evaluation:
        if request.json_schema is not None:
            raise GatewayError(
                "response_format is refused in a training session: a grammar would bias the policy's ratio; "
                "ask for JSON in the prompt",
                param="response_format",
            )
        replaced = [name for name, value in wishes.items() if value != getattr(run, name)]
        replaced += request.foreign
        if request.tool_choice not in ("auto", "none"):
            replaced.append("tool_choice")
        limit = min(limit, run.max_new_tokens)
        wishes = {}
    elif request.foreign:
        name = request.foreign[0]
        raise GatewayError(f"{name} is not supported by the engine: leave it out", param=name)
    else:
        replaced = []
    return (
        replace(
            run,
            **wishes,
            max_new_tokens=limit,
            stop=tuple(dict.fromkeys((*run.stop, *request.stop))),
            top_logprobs=request.top_logprobs,
        ),
        replaced,
    )
