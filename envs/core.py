"""`ChatEnv`: several turns of text and tool calls, asynchronous at heart, with Gymnasium's face over it.

Everything that an agent does to an environment is one of three things: `observe` enters an assistant message,
`call_tool` runs a tool, `finish` hands in an answer. `astep` is made of these three, and so is every agent adapter;
that is why an episode gives the same reward however it is driven.
"""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import os
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
from gymnasium.error import ResetNeeded

from sparring.envs.hermes import message_text, parse_text
from sparring.envs.loop import run_sync, spawn
from sparring.envs.render import render_ansi, render_html
from sparring.envs.spaces import ChatText
from sparring.envs.tasks import nearest_tasks
from sparring.envs.tools import ToolBox, ToolError
from sparring.errors import ConfigError, SparringError, TaskError, described
from sparring.spelling import did_you_mean
from sparring.types import Failure, Message, StopReason

__all__ = ["ChatEnv"]

_OVER = "The episode is over."
_EXIT_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)


class ChatEnv(gymnasium.Env[str, str | Message]):
    """Base of every environment.

    A subclass implements `task_ids`, `_begin` (the opening messages of a task) and `_submit` (a text without a call),
    and sets `toolbox` where it has tools. It raises `self.reward`, a running total, as soon as reward is earned, so
    that an episode that is cut short keeps what it had; the core turns the total into rewards of steps and turns.

    Attributes:
        messages: the whole conversation, system prompt and worked examples included: what a policy prompts with.
            An assistant message stands there exactly as it was given, never rewritten.
        toolbox: the tools of the episode.
        max_turns: assistant messages until the episode is truncated.
        done, stop_reason: whether and why the episode ended.
        failure: the infrastructure failure that ended it, if one did; the reward then means nothing.
        reward: total so far. reward_parts: named parts for display. turn_rewards: one for each turn that has ended.
    """

    metadata = {"render_modes": ["ansi", "html"], "render_fps": 1}  # noqa: RUF012  # as Gymnasium declares it
    splits: ClassVar[tuple[str, ...]] = ("train", "test")

    def __init__(
        self, *, split: str = "train", task_id: str | None = None, max_turns: int = 16, render_mode: str | None = None
    ) -> None:
        if split not in self.splits:
            raise ConfigError(f"{type(self).__name__} has no split {split!r}; it has {', '.join(self.splits)}")
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"no render_mode {render_mode!r}; there are {', '.join(self.metadata['render_modes'])}")
        try:
            inspect.signature(self.task_ids).bind(split)
        except TypeError as error:
            raise ConfigError(
                f"{type(self).__name__}.task_ids cannot be called with a split ({error}): "
                'declare it as `def task_ids(self, split: str = "train") -> Sequence[str]`'
            ) from None
        self.observation_space = ChatText()
        self.action_space = ChatText(messages=True)
        self.render_mode = render_mode
        self.split = split
        self.max_turns = max_turns
        self.toolbox = ToolBox()
        self._fixed_task_id = task_id
        self._opened_by: int | None = None  # id of the process whose episode holds resources
        self._start_episode("")
        self.done = True  # until the first reset

    def _start_episode(self, task_id: str) -> None:
        self.task_id = task_id
        self.messages: list[Message] = []
        self.done = False
        self.stop_reason: StopReason | None = None
        self.failure: Failure | None = None
        self.reward = 0.0
        self.reward_parts: dict[str, float] = {}
        self.turn_rewards: list[float] = []
        self.turns = 0
        self._turn_open = False
        self._rewarded = 0.0  # part of the total that ended turns have been given
        self._unanswered: list[tuple[str, str]] = []  # (tool, call id) of the message's calls that are still to run
        self._running = 0  # calls that are running now: agents may run the calls of a message side by side
        self._calls = 0
        self._problem: str | None = None

    # What a subclass says.

    @abstractmethod
    def task_ids(self, split: str = "train") -> Sequence[str]:
        """The ids of a split: finite, indexable, cheap. Each begins with its split and a slash.

        Raises:
            TaskError: there is no such split, or its data cannot be read.
        """

    @abstractmethod
    async def _begin(self, task_id: str) -> Sequence[Message]:
        """Set the task up and return the opening messages. Containers start here, and not in the constructor."""

    @abstractmethod
    async def _submit(self, answer: str) -> str | None:
        """Take a text without a tool call. None: accepted, the episode is over; else the observation to go on with."""

    async def _close(self) -> None:
        """Free what `_begin` took. Runs before the next `_begin` and in `aclose`, also where `_begin` failed."""

    def demonstration(self) -> list[Message] | None:
        """A gold continuation of the opening messages, for warm start, where the environment has one."""
        return None

    # The asynchronous truth.

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode. `options["task_id"]` beats the constructor's `task_id`, which beats a draw by seed.

        Raises:
            TaskError: no such task (the nearest ids are named), an empty split, or a task that cannot be scored.
            SparringError: what the task needs (a container, a service) did not start.
        """
        super().reset(seed=seed)
        await self.aclose()
        task_id = self._choose_task(dict(options or {}))
        self._start_episode(task_id)
        self._opened_by = os.getpid()
        if self._holds_resources:
            _open_envs.add(self)
        try:
            self.messages.extend(self._checked_opening(await self._begin(task_id)))
        except BaseException as error:
            self._fail(error)
            raise
        info = {
            "messages": [message.to_openai() for message in self.messages],
            "task_id": task_id,
            "split": task_id.partition("/")[0],
            "tools": json.dumps(self.tools),
            "system": "\n\n".join(message.content or "" for message in self.messages if message.role == "system"),
        }
        return _joined(message for message in self.messages if message.role != "system"), info

    async def astep(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One assistant message, raw or structured; returns observation, reward, terminated, truncated, info.

        A fault of the infrastructure ends the episode as truncated with `info["failure"]`; a bug raises.

        Raises:
            ResetNeeded: the episode is over, or never began.
            TypeError: the action is neither text nor an assistant message.
        """
        if self.done:
            raise ResetNeeded(f"{type(self).__name__} has no running episode (task {self.task_id!r}): reset it first")
        message = Message("assistant", action) if isinstance(action, str) else action
        if not isinstance(message, Message) or message.role != "assistant":
            raise TypeError(f"an action is a str or an assistant Message, got {action!r:.80}")
        start, before = len(self.messages) + 1, self.reward
        try:
            await self.observe(message)
            if not message.tool_calls:
                await self.finish(message.content)
            for call in message.tool_calls:
                await self.call_tool(call.name, call.arguments)
        except SparringError:
            pass  # noted in self.failure
        new = self.messages[start:]
        terminated = self.stop_reason is StopReason.FINISHED
        info: dict[str, Any] = {"messages": [message.to_openai() for message in new], "turn": self.turns}
        if self.stop_reason is not None:
            info |= {"stop_reason": self.stop_reason.value, "reward_parts": dict(self.reward_parts)}
            if self.failure is not None:
                info["failure"] = {"kind": self.failure.kind, "message": self.failure.message}
            if not terminated:
                info["truncation_reason"] = self.stop_reason.value
        return _joined(new), self.reward - before, terminated, self.done and not terminated, info

    async def aclose(self) -> None:
        """End the episode and free everything. Idempotent."""
        self.done = True
        if self._opened_by is not None:
            self._opened_by = None
            await self._close()
            _open_envs.discard(self)

    # The three primitives. After the end of an episode they do nothing, since agent loops stop late.

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools' schemas, as in the chat completions API."""
        return self.toolbox.schemas

    async def observe(self, message: Message) -> None:
        """Enter an assistant message, which costs a turn. Its calls are then run by `call_tool`, in any order."""
        if self.done:
            return
        self._end_turn()  # calls of the message before that were never run
        if self.done:
            return
        self.messages.append(message)
        self.turns += 1
        self._turn_open = True
        self._unanswered = [(call.name, call.id) for call in message.tool_calls]
        # Text of a malformed call beside well-formed ones: the message is spoiled, as it is on the raw-text path.
        self._problem = parse_text(message.content or "").problem if message.tool_calls and message.content else None

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """Run a tool and return its result, or what was wrong with the call, as text.

        Raises:
            SparringError: the infrastructure failed; the episode is then over.
        """
        if self.done:
            return _OVER
        call_id = self._claim(name)
        self._running += 1
        try:
            if self._problem is not None:
                raise ToolError(self._problem)
            result = await self.toolbox.call(name, arguments)
        except ToolError as error:
            result = f"Error: {error}"
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._running -= 1
        self.messages.append(Message("tool", result, tool_call_id=call_id, name=name))
        if not self._unanswered and not self._running:
            self._end_turn()
        return result

    async def finish(self, text: str | None) -> str | None:
        """Hand in the assistant's final text. None: the episode is over; else the observation to go on with.

        A text that holds tool calls (an agent's SDK did not see them) is treated as the raw text it is: the calls run.

        Raises:
            SparringError: the infrastructure failed; the episode is then over.
        """
        if self.done:
            return None
        start = len(self.messages)
        parsed = parse_text(text or "")
        if parsed.calls:
            self._unanswered = [(name, f"call_{self._calls + i}") for i, (name, _) in enumerate(parsed.calls)]
            self._calls += len(parsed.calls)
            for name, arguments in parsed.calls:
                await self.call_tool(name, arguments)
        else:
            try:
                observation = parsed.problem or self._checked_observation(await self._submit(parsed.answer))
            except Exception as error:
                self._fail(error)
                raise
            if observation is None:
                if not self.done:  # `_submit` may have ended it itself, for another reason
                    self._end(StopReason.FINISHED)
            else:
                self.messages.append(Message("user", observation))
                self._end_turn()
        return None if self.done else _joined(self.messages[start:])

    def truncate(self, reason: StopReason) -> None:
        """A budget outside the environment ran out: the episode ends with the reward that it has so far."""
        if not self.done:
            self._end(reason)

    # Gymnasium's face.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """As `areset`, on the private event loop."""
        return run_sync(self.areset(seed=seed, options=options))

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As `astep`, on the private event loop."""
        return run_sync(self.astep(action))

    def render(self) -> str | None:  # type: ignore[override]
        """The conversation so far, as text for a terminal or as an HTML fragment; None without a render mode."""
        if self.render_mode is None:
            return None
        return render_html(self.messages) if self.render_mode == "html" else render_ansi(self.messages)

    def close(self) -> None:
        """As `aclose`, on the private event loop. Idempotent."""
        if self._opened_by is not None:
            run_sync(self.aclose())

    def __del__(self) -> None:
        # Handed over, not waited for: the collector runs on any thread. A forked copy must not close its parent's.
        if self.__dict__.get("_opened_by") == os.getpid() and self._holds_resources:
            spawn(self.aclose())

    # Inside.

    @property
    def _holds_resources(self) -> bool:
        return type(self)._close is not ChatEnv._close

    def _checked_opening(self, opening: Any) -> Sequence[Message]:
        if isinstance(opening, str) or not isinstance(opening, Sequence):
            wrong = type(opening).__name__
        elif odd := [type(m).__name__ for m in opening if not isinstance(m, Message)]:
            wrong = f"a sequence that holds a {odd[0]}"
        else:
            return opening
        raise ConfigError(
            f"{type(self).__name__}._begin must return Messages, got {wrong}; "
            'one prompt is [sparring.types.Message("user", text)]'
        )

    def _checked_observation(self, observation: Any) -> str | None:
        if observation is None or isinstance(observation, str):
            return observation
        raise ConfigError(
            f"{type(self).__name__}._submit must return None (accepted) or a str (what the model is told), got "
            f"{type(observation).__name__}; reward is added to self.reward"
        )

    def _choose_task(self, options: dict[str, Any]) -> str:
        chosen = options.pop("task_id", self._fixed_task_id)
        if options:
            unknown = next(iter(options))
            raise ConfigError(f"reset has no option {unknown!r}{did_you_mean(unknown, ['task_id'])}")
        if chosen is None:
            ids = self.task_ids(self.split)
            if not ids:
                raise TaskError(f"the split {self.split!r} of {type(self).__name__} has no tasks")
            return ids[int(self.np_random.integers(len(ids)))]
        split = chosen.partition("/")[0] if isinstance(chosen, str) else None
        if split not in self.splits or chosen not in self.task_ids(split):
            near = nearest_tasks(str(chosen), *(self.task_ids(known) for known in self.splits))
            raise TaskError(f"{type(self).__name__} has no task {chosen!r}; the nearest are {', '.join(near)}")
        return chosen

    def _claim(self, name: str) -> str:
        """The id of the first unanswered call of this tool; a new one for a call that no message announced."""
        for index, (announced, call_id) in enumerate(self._unanswered):
            if announced == name:
                del self._unanswered[index]
                return call_id
        self._calls += 1
        return f"call_{self._calls - 1}"

    def _end_turn(self) -> None:
        if self.done:
            return
        self._settle_turn()
        if self.turns >= self.max_turns:
            self._end(StopReason.MAX_TURNS)

    def _settle_turn(self) -> None:
        if self._turn_open:
            self.turn_rewards.append(self.reward - self._rewarded)
            self._rewarded = self.reward
            self._turn_open = False

    def _end(self, reason: StopReason) -> None:
        self._settle_turn()
        self.stop_reason = reason
        self.done = True

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, SparringError):
            self.failure = Failure(error.kind, f"task {self.task_id}: {type(error).__name__}: {error}")
        else:
            self.failure = Failure("internal", f"task {self.task_id}: {described(error)}")
        self._end(StopReason.FAILED)


_open_envs: weakref.WeakSet[ChatEnv] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open_envs.clear)


@atexit.register
def _close_all() -> None:
    for env in list(_open_envs):
        try:
            spawn(env.aclose()).result(timeout=_EXIT_TIMEOUT_S)
        except Exception as error:
            _log.warning("the environment of task %s did not close at exit: %r", env.task_id, error)


def _joined(messages: Any) -> str:
    return "\n\n".join(text for text in map(message_text, messages) if text)
