"""The conversation that a run without signal ends with reads as `sparring view` prints it."""

from sparring.backend.buffer import GroupSpec, StoredGroup, StoredTrajectory
from sparring.backend.rollout.scheduler import _sample
from sparring.transcript import said
from sparring.types import Message, StopReason, ToolCall, Trajectory

CALL = ToolCall("call_0", "lookup", '{"key": "a"}')


def test_a_message_says_its_text_and_its_calls():
    assert said(Message("user", "hello").to_openai()) == "hello"
    assert said(Message("assistant", None, (CALL,)).to_openai()) == 'lookup({"key": "a"})'
    assert said(Message("assistant", "First:", (CALL, CALL)).to_openai()).split("\n") == [
        "First:",
        'lookup({"key": "a"})',
        'lookup({"key": "a"})',
    ]


def test_the_excerpt_shows_calls_as_calls_and_the_text_beside_them():
    spec = GroupSpec(0, "g0", "x/X-v0", "train/0", seed=0, size=1)
    messages = (Message("user", "look it up"), Message("assistant", "First:", (CALL,)), Message("tool", "1"))
    trajectory = Trajectory(
        "g0.00.0", "g0", "x/X-v0", "train/0", 0, (), 1.0, StopReason.FINISHED,
        messages=tuple(m.to_openai() for m in messages),
    )  # fmt: skip
    assert _sample(StoredGroup(spec, (StoredTrajectory(trajectory),))).splitlines()[1:] == [
        "    user: look it up",
        '    assistant: First: lookup({"key": "a"})',
        "    tool: 1",
    ]
