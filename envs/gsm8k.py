"""`sparring/GSM8K-v0`: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168), calculator optional."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sparring.envs.arithmetic import evaluate, format_number
from sparring.envs.core import ChatEnv
from sparring.envs.math_check import answers_equal, require_math_verify
from sparring.envs.tasks import TaskRange
from sparring.envs.tools import ToolBox
from sparring.envs.vector import ChatVectorEnv
from sparring.errors import ConfigError, TaskError
from sparring.hub import hub_or_cache
from sparring.types import Message

__all__ = ["GSM8K", "extract_answer", "make_vector"]

_HUB_ID = "openai/gsm8k"
_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_WITH_CALCULATOR = " Use the calculator for arithmetic."


class Problem(NamedTuple):
    """A question, its worked solution, and the number that the solution ends in."""

    question: str
    solution: str
    answer: str


class GSM8K(ChatEnv):
    """One problem an episode. Reward 1 for the right final number, else 0.

    Args:
        path: folder with `train.jsonl` and `test.jsonl` (fields `question`, `answer`). Without it, the folder `gsm8k`
            under the environment variable SPARRING_DATA; without that, the Hugging Face hub.
        calculator: offer a calculator as a tool.
        check_timeout_s: a check of an answer that takes longer is a failure of the episode.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        calculator: bool = False,
        check_timeout_s: float = 10.0,
        max_turns: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        require_math_verify()
        self._path = _data_folder(path)
        self._check_timeout_s = check_timeout_s
        self._system = _SYSTEM + (_WITH_CALCULATOR if calculator else "")
        self.toolbox = ToolBox([self.calculator] if calculator else [])
        self._problem_now = Problem("", "", "")

    def task_ids(self, split: str = "train") -> Sequence[str]:
        return TaskRange(split, len(self._problems(split)))

    def _problems(self, split: str) -> Sequence[Problem]:
        if split not in self.splits:
            raise TaskError(f"GSM8K has no split {split!r}; it has {', '.join(self.splits)}")
        return _from_hub(split) if self._path is None else _from_file(self._path / f"{split}.jsonl")

    async def _begin(self, task_id: str) -> Sequence[Message]:
        split, number = task_id.split("/")
        self._problem_now = self._problems(split)[int(number)]
        self.reward_parts = {"exact": 0.0}
        return [Message("system", self._system), Message("user", self._problem_now.question)]

    async def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: numbers, + - * / and parentheses, such as (3 + 4) * 2
        """
        return format_number(evaluate(expression))

    async def _submit(self, answer: str) -> None:
        final = extract_answer(answer)
        if await answers_equal(self._problem_now.answer, final, timeout_s=self._check_timeout_s):
            self.reward = self.reward_parts["exact"] = 1.0

    def demonstration(self) -> list[Message]:
        reasoning = re.sub(r"<<.*?>>", "", self._problem_now.solution.partition("####")[0]).strip()
        return [Message("assistant", f"{reasoning}\n\\boxed{{{self._problem_now.answer}}}")]


make_vector = partial(ChatVectorEnv, GSM8K)


def extract_answer(text: str) -> str:
    """The final answer of a solution, normalised: the last `\\boxed{}`, else what follows `####`, `answer is` or
    `Answer:`, else the last number; "" where there is none.
    """
    if (boxed := _last_boxed(text)) is not None:
        return _normalise(boxed)
    marked = re.split(r"####|answer is:?|answer:", text, flags=re.IGNORECASE)
    if len(marked) > 1 and (numbers := _NUMBER.findall(marked[-1])):
        return _normalise(numbers[0])
    numbers = _NUMBER.findall(text)
    return _normalise(numbers[-1]) if numbers else ""


_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?|-?\$?\.\d+", re.ASCII)
_UNITS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[!,;: ]|\\?[$%]|(?<=\d),(?=\d{3})|^\s*\w+\s*=")


def _normalise(answer: str) -> str:
    """Without dollar and per cent signs, thousands separators, units, a leading `x =` and a final full stop."""
    plain = _UNITS.sub("", answer).strip().rstrip(".").strip()
    if "\\" not in plain and re.search(r"[A-Za-z]", plain) and (numbers := _NUMBER.findall(plain)):
        plain = numbers[0]  # "18 eggs"
    return plain.replace(",", "") if _NUMBER.fullmatch(plain) else plain


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def _data_folder(path: str | Path | None) -> Path | None:
    """Where the files are, or None for the hub. A folder that was named must exist."""
    if path is None and not os.environ.get("SPARRING_DATA"):
        return None
    folder = Path(path).expanduser() if path is not None else Path(os.environ["SPARRING_DATA"]) / "gsm8k"
    if not folder.is_dir():
        source = "path" if path is not None else "SPARRING_DATA"
        raise ConfigError(f"GSM8K: {source} names {folder}, no folder; it must hold train.jsonl and test.jsonl")
    return folder


@functools.cache
def _from_hub(split: str) -> Sequence[Problem]:
    try:
        from datasets import load_dataset

        with hub_or_cache():
            rows = load_dataset(_HUB_ID, "main", split=split)
    except Exception as error:  # the hub client raises many kinds; each means the same here
        raise TaskError(
            f"GSM8K: {_HUB_ID} did not load from the Hugging Face hub ({type(error).__name__}: {error}); "
            "give path= (in a configuration env.kwargs.path), or set SPARRING_DATA to a folder with gsm8k/train.jsonl "
            "and gsm8k/test.jsonl"
        ) from error
    return [_problem(row, f"{_HUB_ID} {split} row {number}") for number, row in enumerate(rows)]


def _from_file(path: Path) -> Sequence[Problem]:
    try:
        return _read_jsonl(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise TaskError(f"GSM8K: cannot read {path}: {error.strerror}") from error


@functools.lru_cache(maxsize=8)
def _read_jsonl(path: Path, _modified_ns: int) -> Sequence[Problem]:
    problems = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                problems.append(_problem(_row(line, f"{path}:{number}"), f"{path}:{number}"))
    if not problems:
        raise TaskError(f"GSM8K: {path} holds no problems")
    return problems


def _row(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise TaskError(f"GSM8K: {where} is not JSON: {error}") from None


def _problem(row: Any, where: str) -> Problem:
    match row:
        case {"question": str(question), "answer": str(solution)} if question.strip():
            pass
        case _:
            raise TaskError(f"GSM8K: {where} lacks the text of a question or an answer")
    answer = _normalise(solution.rpartition("####")[2].strip()) if "####" in solution else ""
    if not _NUMBER.fullmatch(answer):
        raise TaskError(f"GSM8K: {where} has no number after ####, so nothing could be scored against it")
    return Problem(question.strip(), solution, answer)
