"""The conversations of one session: a prefix tree by message, whose sampled messages hold their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sparring.backend.engines.base import Completion
from sparring.backend.gateway.canonical import message_key, restored
from sparring.types import Message

__all__ = ["ConversationTree", "Match", "TurnNode"]


@dataclass(eq=False)
class TurnNode:
    """One model call. Its context is its parent's, then `prompt_ids`, then what was sampled.

    Attributes:
        prompt_ids: tokens between the parent's last one and the first sampled one; never sampled by this turn.
        messages: the messages that these tokens stand for, the sampled one last.
        trained: whether the trained policy sampled it; frozen policies get no action mask.
        lineage: names the chain of turns that extend one another, for the engine's cache.
    """

    parent: TurnNode | None
    prompt_ids: list[int]
    completion: Completion
    messages: tuple[Message, ...]
    interaction_id: str
    lineage: str
    ended: bool
    finish_reason: str = "stop"
    agent_id: str = "main"
    policy_id: str = "policy"
    temperature: float = 1.0
    trained: bool = True
    children: list[TurnNode] = field(default_factory=list)

    @property
    def path(self) -> list[TurnNode]:
        """The turns from the root to this one."""
        path: list[TurnNode] = []
        node: TurnNode | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def token_ids(self) -> list[int]:
        """The whole context, its own tokens last."""
        return [id_ for turn in self.path for ids in (turn.prompt_ids, turn.completion.token_ids) for id_ in ids]


@dataclass
class _Place:
    """A message's place in the tree."""

    children: dict[bytes, _Place] = field(default_factory=dict)
    turns: list[TurnNode] = field(default_factory=list)


@dataclass(frozen=True)
class Match:
    """What the tree knows of a request.

    Attributes:
        parent: the latest turn that the request extends, or None.
        length: how many of the request's messages `parent`'s context covers.
        known: how many of its messages the tree has seen in this order, sampled or not.
    """

    parent: TurnNode | None
    length: int
    known: int


class ConversationTree:
    """Attributes:
    turns: all model calls, in the order in which they were recorded.
    breaks: why each sequence after the first had to start; the total is the number of leaves less one.
    """

    def __init__(self) -> None:
        self.turns: list[TurnNode] = []
        self.breaks: Counter[str] = Counter()
        self._roots: dict[bytes, _Place] = {}
        self._answers: dict[str, Message] = {}  # by the ids of their tool calls

    @property
    def leaves(self) -> list[TurnNode]:
        return [turn for turn in self.turns if not turn.children]

    def restored(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with this session's answers as they were given; see `canonical.restored`."""
        return restored(messages, self._answers.get)

    def match(self, root: bytes, messages: Sequence[Message]) -> Match:
        place = self._roots.get(root)
        best: Match | None = None
        for known, message in enumerate(messages):
            place = place.children.get(message_key(message)) if place else None
            if place is None:
                return Match(best.parent, best.length, known) if best else Match(None, 0, known)
            if place.turns:
                best = Match(_choose(place.turns, message), known + 1, known + 1)
        return Match(best.parent, best.length, len(messages)) if best else Match(None, 0, len(messages))

    def add(
        self, root: bytes, messages: Sequence[Message], turn: TurnNode, spellings: Iterable[Message]
    ) -> str | None:
        """Record a turn that answered `messages`; it will be recognised in any of its `spellings`.

        Returns:
            why it had to start a sequence of its own, or None where it did not.
        """
        reason = self._break_reason(root, messages, turn)
        if reason is not None:
            self.breaks[reason] += 1
        self.turns.append(turn)
        self._answers.update((call.id, turn.messages[-1]) for call in turn.messages[-1].tool_calls)
        if turn.parent is not None:
            turn.parent.children.append(turn)
        place = self._roots.setdefault(root, _Place())
        for message in messages:
            place = place.children.setdefault(message_key(message), _Place())
        first, *others = dict.fromkeys(message_key(spelling) for spelling in spellings)
        said = place.children.setdefault(first, _Place())
        said.turns.append(turn)
        for key in others:
            place.children.setdefault(key, said)
        return reason

    def _break_reason(self, root: bytes, messages: Sequence[Message], turn: TurnNode) -> str | None:
        if not self.turns or (turn.parent is not None and not turn.parent.children):
            return None
        match = self.match(root, messages)
        if turn.parent is None and any(self.match(other, messages).parent for other in self._roots if other != root):
            return "tools_changed"
        if any(message.role == "assistant" for message in messages[match.known :]):
            return "history_rewritten"
        if turn.parent is not None or match.known == len(messages):
            return "branched"
        if match.parent is not None:
            return "template"  # the tree knows the past, but the template has no suffix for it
        return "new_conversation"


def _choose(turns: Sequence[TurnNode], message: Message) -> TurnNode:
    """Of turns that said the same: the one whose call ids the client kept, else the newest that nobody continued."""
    ids = {call.id for call in message.tool_calls}
    for turn in turns:
        if ids & {call.id for call in turn.messages[-1].tool_calls}:
            return turn
    return next((turn for turn in reversed(turns) if not turn.children), turns[-1])
