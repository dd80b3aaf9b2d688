"""A customer and an agent without a model: both play a task from its own data, always in the same way.

They are for tests, for CPU runs and for demonstrations. Scores against a scripted user are not comparable with
published ones, which a model as the user gave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparring.envs.tau2.transcript import Call, Entry, user_view
from sparring.envs.tau2.user import STOP_WORDS, UserSide
from sparring.envs.tau2.world import Requestor, World
from sparring.types import Message, ToolCall

__all__ = ["GoldAgent", "ScriptedUser", "demonstrate"]

_STOP, _TRANSFER = STOP_WORDS[:2]
_GO_AHEAD = "Yes, please go ahead."


class ScriptedUser:
    """Tells what the task's scenario says, piece by piece; uses the tools that the agent names; then ends.

    The pieces are the reason for the call, what the customer knows, and the instructions, each given once, in that
    order. A tool is used when the agent's message names it (`toggle_airplane_mode`, or the words), with the arguments
    of the task's own action of that name, or with none where it needs none.
    """

    async def __call__(self, side: UserSide) -> Entry:
        return self.answer(side)

    def answer(self, side: UserSide) -> Entry:
        heard_at = max((i for i, m in enumerate(side.messages) if m.role == "user"), default=-1)
        heard = side.messages[heard_at].content or "" if heard_at >= 0 else ""
        since = side.messages[heard_at + 1 :]
        wanted = _wanted(heard, side, side.messages[:heard_at] if heard_at >= 0 else [])
        done = [m for m in since if m.tool_calls]
        if len(done) < len(wanted):
            name, arguments = wanted[len(done)]
            number = sum(len(m.tool_calls) for m in side.messages)
            return Entry("user", calls=(Call(f"user_{number}", name, arguments, "user"),))
        if done:
            return Entry("user", "\n".join(["Done.", *(m.content or "" for m in since if m.role == "tool")]))
        if "transferred to a human agent" in heard.lower():
            return Entry("user", _TRANSFER)
        said = {m.content for m in side.messages if m.role == "assistant"}
        return Entry("user", next((text for text in _pieces(side.task) if text not in said), _STOP))


def _pieces(task: Any) -> Iterator[str]:
    instructions = task.user_scenario.instructions
    if isinstance(instructions, str):
        yield instructions
    else:
        for text in (instructions.reason_for_call, instructions.known_info, instructions.task_instructions):
            if text and text.strip():
                yield text
    yield _GO_AHEAD


def _wanted(heard: str, side: UserSide, before: Sequence[Message]) -> list[tuple[str, Mapping[str, Any]]]:
    """The calls that the agent's message asks for, in its order."""
    if not side.tools:
        return []
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in side.tools}
    criteria = side.task.evaluation_criteria
    gold = [action for action in (criteria.actions if criteria else None) or () if action.requestor == "user"]
    for message in before:
        for call in message.tool_calls:
            made = json.loads(call.arguments)
            spent = next((a for a in gold if a.name == call.name and a.arguments == made), None)
            if spent is not None:
                gold.remove(spent)
    wanted: list[tuple[str, Mapping[str, Any]]] = []
    for match in re.finditer(_names_pattern(schemas), heard, re.IGNORECASE):
        name = re.sub(r"\s", "_", match[0].lower())
        action = next((a for a in gold if a.name == name), None)
        if action is not None:
            gold.remove(action)
            wanted.append((name, action.arguments))
        elif not schemas[name].get("required"):
            wanted.append((name, {}))
    return wanted


def _names_pattern(names: Mapping[str, Any]) -> str:
    longest_first = sorted(names, key=len, reverse=True)
    return r"\b(?:" + "|".join(name.replace("_", r"[_\s]") for name in longest_first) + r")\b"


class GoldAgent:
    """Takes the task's gold actions, asks the user for those that are the user's, and says the facts."""

    def __init__(self, task: Any, *, solo: bool = False) -> None:
        criteria = task.evaluation_criteria
        self._actions = list((criteria.actions if criteria else None) or ())
        self._facts = list((criteria.communicate_info if criteria else None) or ())
        self._solo = solo
        self._made = 0

    def next_message(self) -> Message:
        if self._actions and (self._solo or self._actions[0].requestor == "assistant"):
            action = self._actions.pop(0)
            return self._call(action.name, action.arguments)
        if self._actions:
            asked = []
            while self._actions and self._actions[0].requestor == "user":
                asked.append(self._actions.pop(0).name)
            return Message("assistant", f"Please do this on your side: {', '.join(asked)}.")
        if self._solo:
            return self._call("done", {})
        facts, self._facts = self._facts, []
        return Message("assistant", " ".join(["That is all.", *facts]))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Message:
        self._made += 1
        return Message("assistant", tool_calls=(ToolCall(f"call_{self._made - 1}", name, json.dumps(arguments)),))


def demonstrate(
    task: Any, world: World, opening: Sequence[Entry], user_tools: Sequence[Mapping[str, Any]], *, solo: bool
) -> list[Message]:
    """What follows `opening` when the gold agent meets the scripted user, as the agent sees it. Uses `world` up."""
    agent, user = GoldAgent(task, solo=solo), ScriptedUser()
    entries = list(opening)
    messages: list[Message] = []

    def run(call: Call, requestor: Requestor) -> str:
        content, error = world.respond(call.name, call.arguments, requestor)
        entries.append(Entry("tool", content, (), call.id, requestor, error))
        return content

    while True:
        message = agent.next_message()
        messages.append(message)
        if message.tool_calls:
            made = message.tool_calls[0]
            if solo and made.name == "done":
                return messages
            call = Call(made.id, made.name, json.loads(made.arguments))
            entries.append(Entry("assistant", None, (call,)))
            messages.append(Message("tool", run(call, "assistant"), tool_call_id=call.id, name=call.name))
            continue
        entries.append(Entry("assistant", message.content))
        while (said := user.answer(UserSide(task, "", user_view(entries), user_tools, 0))).calls:
            entries.append(said)
            for call in said.calls:
                run(call, "user")
        entries.append(said)
        if any(word in (said.content or "") for word in STOP_WORDS):
            return messages
        messages.append(Message("user", said.content))
