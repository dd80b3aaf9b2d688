"""`sparring/Tau2-<domain>-v0`: customer service between an agent, a simulated customer and their tools.

The conversation is upstream's orchestrator as a state machine without a thread: a text of the agent goes to the user,
who may use tools of their own before answering; a tool call goes to the world. Steps and errors are counted as upstream
counts them, and when either side ends the conversation, the verdict is upstream's.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar

from sparring.envs.core import ChatEnv
from sparring.envs.hermes import parse_text
from sparring.envs.tau2.domain import FIRST_MESSAGE, load_domain
from sparring.envs.tau2.scripted import ScriptedUser, demonstrate
from sparring.envs.tau2.transcript import Call, Entry, agent_view, entries_of, user_view
from sparring.envs.tau2.user import STOP_WORDS, ModelUser, OpenAIModel, User, UserSide
from sparring.envs.tau2.verdict import Verdict, evaluate, premature
from sparring.envs.tools import ToolBox, ToolError
from sparring.envs.vector import ChatVectorEnv
from sparring.errors import ConfigError, TaskError
from sparring.types import Message, StopReason

__all__ = ["Judge", "Tau2Env", "make_vector"]

Judge = Callable[[Sequence[Entry], Sequence[str]], Awaitable[Sequence[bool]]]
"""Answers, for each natural-language assertion, whether a conversation meets it."""


class Tau2Env(ChatEnv):
    """One domain of τ²-bench.

    Reward: upstream's, when the user (in solo mode the agent) ends the conversation; 0 when it ends otherwise. With
    `shaping` above 0, that part of the reward is instead the share of the task's gold actions that were taken, paid as
    they are taken.

    Args:
        domain: "airline", "retail", "telecom" or "mock".
        user: "scripted"; or the model that plays the customer, as `{"model": ..., "base_url": ..., ...}` for
            `OpenAIModel`; or any `User`.
        solo: no user; the agent is given the ticket, has the user's tools too, and ends by calling `done`.
        max_steps, max_errors: upstream's budgets. A message is a step, and so is running the calls of a message.
        enforce_protocol: a message with both text and a call ends the conversation, as upstream's option does.
        judge: for tasks that are scored by natural-language assertions too; those without a judge are refused.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "test", "base", "small", "full")

    def __init__(
        self,
        *,
        domain: str,
        user: str | Mapping[str, Any] | User = "scripted",
        solo: bool = False,
        max_steps: int = 200,
        max_errors: int = 10,
        enforce_protocol: bool = False,
        judge: Judge | None = None,
        shaping: float = 0.0,
        max_turns: int = 200,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        if max_steps < 1 or max_errors < 1:
            raise ConfigError(f"max_steps and max_errors must be at least 1, got {max_steps} and {max_errors}")
        if not 0 <= shaping <= 1:
            raise ConfigError(f"shaping is a share of the reward, from 0 to 1, got {shaping}")
        self.domain = load_domain(domain, solo)
        self.user = _make_user(user)
        self.max_steps = max_steps
        self.max_errors = max_errors
        self._enforce_protocol = enforce_protocol
        self._judge = judge
        self._shaping = shaping
        self.toolbox = _Tools(self)
        self._forget()

    def _forget(self) -> None:
        self.task: Any = None
        self.start: Any = None
        self.world: Any = None
        self.episode_seed = 0
        self.entries: list[Entry] = []
        self.opening: tuple[Entry, ...] = ()
        self.steps = 0
        self.errors = 0
        self.termination: str | None = None
        self.verdict: Verdict | None = None
        self._text = ""  # of the message that is being answered
        self._batch: list[tuple[Call, str, bool]] = []  # its calls so far: what was called, what came back
        self._refused = 0  # its calls that could not be read
        self._pending = 0  # its calls that are still to run
        self._stopping = False  # one of them is `done`, in solo mode: then none of them runs
        self._taken: set[int] = set()  # gold actions taken, by index: for shaping

    def task_ids(self, split: str = "train") -> Sequence[str]:
        """Ids such as `test/12`: split, then upstream's id; none where the domain lacks the split."""
        if split not in self.splits:
            raise TaskError(f"τ²-bench has no split {split!r}; it has {', '.join(self.splits)}")
        return self.domain.task_ids(split)

    async def _begin(self, task_id: str) -> Sequence[Message]:
        self._forget()
        self.task = self.domain.task(task_id.partition("/")[2])
        self._check_scorable()
        self.episode_seed = int(self.np_random.integers(2**31))
        self.start = self.domain.start(self.task)
        self.world = self.start.world(f"episode {self.episode_seed}")
        opening = [Message("system", self.domain.agent_prompt(self.task))]
        state = self.task.initial_state
        if state is not None and state.message_history:
            self.entries = entries_of(state.message_history)
            opening += agent_view(self.entries)
        elif not self.domain.solo:
            self.entries = [Entry("assistant", FIRST_MESSAGE)]
            opening.append(Message("assistant", FIRST_MESSAGE))
        if self.domain.solo:
            self.steps = -1  # upstream asks a solo agent for its first message before it counts
        elif self.entries[-1].role == "assistant" or self.entries[-1].requestor == "user":
            reply = await self._hear_user()
            if reply is not None:
                opening.append(Message("user", reply))
        self.opening = tuple(self.entries)
        return opening

    def _check_scorable(self) -> None:
        criteria = self.task.evaluation_criteria
        judged = criteria is not None and any(getattr(p, "value", p) == "NL_ASSERTION" for p in criteria.reward_basis)
        if judged and self._judge is None:
            raise TaskError(
                f"task {self.task_id} is scored by natural-language assertions too: pass a judge, or leave it out"
            )
        if self.domain.solo and self.task.ticket is None:
            raise TaskError(f"task {self.task_id} has no ticket, which solo mode needs")

    # The agent's turn.

    async def observe(self, message: Message) -> None:
        await self._enter_calls()  # of the message before, some of which may never have been run
        await super().observe(message)
        if self.done:
            return
        parsed = parse_text(message.content or "")
        if parsed.problem is not None:  # the core says so to the agent, and runs none of the message's calls
            self.entries.append(Entry("assistant", message.content))
            self._count_step(errors=1)
            await self._check_budgets()
            return
        names = [call.name for call in message.tool_calls] or [name for name, _ in parsed.calls]
        self._text = (message.content or "") if message.tool_calls else parsed.answer
        self._pending = len(names)
        self._stopping = self.domain.solo and "done" in names
        if self._pending and self._text.strip() and self._enforce_protocol:
            await self._conclude("agent_error")

    def run_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The agent calls a tool. Returns what upstream's tool message says; upstream's errors are text too."""
        if self._stopping:
            return "The conversation ends here."
        call = Call(f"call_{len(self.entries)}_{len(self._batch)}", name, arguments)
        content, error = self.world.respond(name, arguments)
        self._batch.append((call, content, error))
        self._shape(call)
        return content

    async def call_answered(self, *, refused: bool) -> None:
        """One call of the message has run or, `refused`, could not be read."""
        self._pending -= 1
        self._refused += refused
        if self._pending <= 0:
            await self._enter_calls()

    async def _enter_calls(self) -> None:
        """Enter the agent's message with the calls that have run, in the order in which they did, and their results."""
        batch, refused, text = self._batch, self._refused, self._text
        stopping = self._stopping and self._pending <= 0 and not self.done
        self._batch, self._refused, self._text, self._pending = [], 0, "", 0
        if not (batch or refused or stopping) or self.done:
            return
        self._count_step()
        if stopping:
            self.entries.append(Entry("assistant", "###STOP###"))
            await self._conclude("agent_stop")
            return
        if batch:
            self.entries.append(Entry("assistant", text or None, tuple(call for call, _, _ in batch)))
            self.entries += [Entry("tool", said, (), call.id, "assistant", error) for call, said, error in batch]
        self._count_step(errors=sum(error for _, _, error in batch) + refused)
        await self._check_budgets()

    async def _submit(self, answer: str) -> str | None:
        """A text of the agent, for the user."""
        if not answer.strip():  # upstream's message model refuses it, and the sample is skipped with a score of 0
            await self._conclude("agent_error")
            return None
        self.entries.append(Entry("assistant", answer))
        self._count_step()
        if self.domain.solo:
            await self._conclude("agent_stop" if "###STOP###" in answer else "agent_error")
            return None
        if await self._check_budgets():
            return None
        return await self._hear_user()

    # The user's turn.

    async def _hear_user(self) -> str | None:
        """Let the user act until it says something to the agent. None: the conversation is over."""
        while True:
            prompt, tools = self.domain.user_prompt(self.task), self.domain.user_tools
            said = await self.user(UserSide(self.task, prompt, user_view(self.entries), tools, self.episode_seed))
            self.entries.append(said)
            self._count_step()
            if not said.calls:
                text = said.content or ""
                if any(word in text for word in STOP_WORDS):
                    await self._conclude("user_stop")
                    return None
                return None if await self._check_budgets() else text
            for call in said.calls:
                content, error = self.world.respond(call.name, call.arguments, "user")
                self.entries.append(Entry("tool", content, (), call.id, "user", error))
                self._shape(call)
                self.errors += error
            self._count_step()
            if await self._check_budgets():
                return None

    # The end.

    def _count_step(self, errors: int = 0) -> None:
        self.steps += 1
        self.errors += errors

    async def _check_budgets(self) -> bool:
        """Upstream looks at its budgets after each step that does not lead to a tool."""
        if self.steps >= self.max_steps or self.errors >= self.max_errors:
            await self._conclude("too_many_errors" if self.errors >= self.max_errors else "max_steps")
        return self.done

    async def _conclude(self, reason: str) -> None:
        """End the conversation. As upstream has it, a budget that ran out on the last step beats the end reached."""
        if self.errors >= self.max_errors:
            reason = "too_many_errors"
        elif self.steps >= self.max_steps:
            reason = "max_steps"
        self.termination = reason
        if reason in ("user_stop", "agent_stop"):
            self.verdict = evaluate(self.task, self.world, self.start.gold, self.entries, await self._judged())
        else:
            self.verdict = premature(reason)
        self.reward = (1 - self._share) * self.verdict.reward + self.reward
        self.reward_parts = self.verdict.parts
        self._end(StopReason.MAX_TURNS if reason == "max_steps" else StopReason.FINISHED)

    async def _judged(self) -> tuple[bool, ...] | None:
        criteria = self.task.evaluation_criteria
        if self._judge is None or criteria is None or not criteria.nl_assertions:
            return None
        return tuple(await self._judge(self.entries, criteria.nl_assertions))

    @property
    def _share(self) -> float:
        """The part of the reward that is paid for gold actions; none where the task has no gold action."""
        criteria = self.task.evaluation_criteria
        return self._shaping if criteria is not None and criteria.actions else 0.0

    def _shape(self, call: Call) -> None:
        if not self._share:
            return
        gold = self.task.evaluation_criteria.actions
        for index, action in enumerate(gold):
            if index not in self._taken and action.compare_with_tool_call(call):
                self._taken.add(index)
                self.reward += self._share / len(gold)
                return

    async def astep(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As `ChatEnv.astep`; at the end, `info["tau2"]` is the report."""
        observation, reward, terminated, truncated, info = await super().astep(action)
        if self.done:
            info["tau2"] = self.report()
        return observation, reward, terminated, truncated, info

    def report(self) -> dict[str, Any]:
        """How the conversation ended and every check that was made; it names nothing of the task's gold answer."""
        verdict = self.verdict or premature("max_steps")
        return {
            "termination_reason": self.termination or "max_steps",
            "reward": verdict.reward,
            "reward_basis": sorted(verdict.breakdown),
            "components": verdict.parts,
            "env_assertions": list(verdict.env_assertions),
            "actions": list(verdict.actions),
            "communicated": list(verdict.communicated),
            "error": verdict.error,
            "steps": self.steps,
            "errors": self.errors,
        }

    def demonstration(self) -> list[Message] | None:
        """The gold actions against the scripted user; None against any other, whose part is not known."""
        if not isinstance(self.user, ScriptedUser) or self.task is None:
            return None
        world = self.start.world(f"episode {self.episode_seed}")
        return demonstrate(self.task, world, self.opening, self.domain.user_tools, solo=self.domain.solo)


make_vector = partial(ChatVectorEnv, Tau2Env)


class _Tools(ToolBox):
    """Upstream's tools. What is wrong with a call upstream says itself, but for arguments that are no JSON object."""

    def __init__(self, env: Tau2Env) -> None:
        super().__init__()
        self._env = env
        self.schemas = env.domain.agent_tools

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        refused = True
        try:
            if isinstance(arguments, str):
                arguments = _parse(name, arguments)
            result = self._env.run_tool(name, arguments)
            refused = False
        finally:
            await self._env.call_answered(refused=refused)
        return result


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments of {name!r} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments of {name!r} must be a JSON object, not a {type(arguments).__name__}")
    return arguments


@cache
def _model_user(settings: str) -> ModelUser:
    """One for all episodes of the process with the same settings: its connections are worth keeping."""
    try:
        return ModelUser(OpenAIModel(**json.loads(settings)))
    except TypeError as error:
        raise ConfigError(f"the user's settings {settings} do not fit: {error}") from error


def _make_user(user: str | Mapping[str, Any] | User) -> User:
    if user == "scripted":
        return ScriptedUser()
    if isinstance(user, Mapping):
        return _model_user(json.dumps(user, sort_keys=True))
    if callable(user):
        return user
    raise ConfigError(f"user is 'scripted', a mapping with a model, or an async function, not {user!r}")
