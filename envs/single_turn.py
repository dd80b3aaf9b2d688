"""`sparring/SingleTurn-v0`: one prompt, one answer, a data set and reward functions as TRL's GRPOTrainer takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sparring.envs.core import ChatEnv
from sparring.envs.hermes import message_text
from sparring.envs.prompt_data import PromptRow, load_prompts
from sparring.envs.reward_funcs import RewardFunc, RewardFuncs
from sparring.envs.tasks import TaskRange
from sparring.envs.vector import ChatVectorEnv
from sparring.errors import ConfigError, TaskError
from sparring.types import Message, StopReason

__all__ = ["SingleTurn", "make_vector"]


class SingleTurn(ChatEnv):
    """One row of a data set an episode; the reward is the weighted sum of the reward functions.

    Functions are called for one completion at a time, with `prompts`, `completions` (messages where the prompt is
    messages, else text) and the row's other columns, each in a list of one. A string prompt is shown to the model as
    a user message. What looks like a tool call is part of the text, and is scored with it.

    Args:
        dataset: JSONL file, folder with `train.jsonl` and `test.jsonl`, hub id, or rows; see `prompt_data`.
        eval_dataset: the split "test", where `dataset` has none.
        reward_funcs: 'file.py:function' or callables, one or several.
        dataset_name: configuration of a data set on the hub.
        reward_timeout_s: what the reward functions may take for one completion; past it, the episode has failed.
    """

    def __init__(
        self,
        *,
        dataset: Any = None,
        reward_funcs: RewardFunc | str | Sequence[RewardFunc | str] = (),
        reward_weights: Sequence[float] | None = None,
        eval_dataset: Any = None,
        dataset_name: str | None = None,
        reward_timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=1, **{k: v for k, v in kwargs.items() if k != "max_turns"})
        if dataset is None:
            raise ConfigError("SingleTurn needs dataset= (JSONL, folder, hub id or rows) and reward_funcs=")
        functions = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else list(reward_funcs)
        self._rewards = RewardFuncs(functions, reward_weights, timeout_s=reward_timeout_s)
        self._sources = {"train": dataset, "test": dataset if eval_dataset is None else eval_dataset}
        self._eval_apart = eval_dataset is not None
        self._name = dataset_name
        self._row = PromptRow("", (), {})

    def task_ids(self, split: str = "train") -> Sequence[str]:
        return TaskRange(split, len(self._rows(split)))

    def _rows(self, split: str) -> Sequence[PromptRow]:
        if split not in self.splits:
            raise TaskError(f"SingleTurn has no split {split!r}; it has {', '.join(self.splits)}")
        # An eval_dataset that is one file is "test" as a whole.
        names = ("test", "train") if split == "test" and self._eval_apart else (split,)
        return next((rows for name in names if (rows := load_prompts(self._sources[split], name, self._name))), ())

    async def _begin(self, task_id: str) -> Sequence[Message]:
        split, number = task_id.split("/")
        self._row = self._rows(split)[int(number)]
        return self._row.messages

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """There are no tools: the message that holds the call is the answer."""
        await self.finish(None)
        return "The episode is over."

    async def finish(self, text: str | None) -> str | None:
        """Score the assistant's message, whatever it holds."""
        if self.done:
            return None
        said = self.messages[-1] if self.messages[-1].role == "assistant" else Message("assistant", text)
        try:
            await self._submit(_completion(said))
        except Exception as error:
            self._fail(error)
            raise
        self._end(StopReason.FINISHED)
        return None

    async def _submit(self, answer: str) -> None:
        row = self._row
        completion = answer if isinstance(row.prompt, str) else [{"role": "assistant", "content": answer}]
        self.reward, self.reward_parts = await self._rewards.score(row.prompt, completion, row.columns)


make_vector = partial(ChatVectorEnv, SingleTurn)


def _completion(said: Message) -> str:
    """The text as the model wrote it, its reasoning included, as TRL's reward functions see it."""
    text = message_text(said)
    return text if said.reasoning is None else f"<think>\n{said.reasoning}\n</think>\n\n{text}"
