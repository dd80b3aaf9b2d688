"""A data set and reward functions as TRL takes them are an environment."""

import asyncio
import json
import threading
import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from sparring.envs.single_turn import SingleTurn
from sparring.errors import ConfigError, TaskError
from sparring.types import Message, ToolCall

ROWS = [{"prompt": f"Say {i}", "answer": str(i)} for i in range(5)]


def exact(prompts, completions, answer, **kwargs):
    return [float(completion == wanted) for completion, wanted in zip(completions, answer, strict=True)]


async def length(completions, **kwargs):
    await asyncio.sleep(0)
    return [len(completions[0]) / 10]


def silent(completions, **kwargs):
    return [None]


def play(action, functions=exact, rows=ROWS, **kwargs):
    env = SingleTurn(dataset=rows, reward_funcs=functions, **kwargs)
    env.reset(options={"task_id": "train/3"})
    return env, env.step(action)


def failure(functions, **kwargs) -> str:
    _, (*_, truncated, info) = play("3", functions, **kwargs)
    assert truncated
    return info["failure"]["message"]


def test_the_row_is_the_task_and_the_function_its_reward():
    env, (_, reward, terminated, truncated, info) = play("3")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["reward_parts"] == {"exact": 1.0}
    assert [message.content for message in env.messages] == ["Say 3", "3"]
    assert play("4")[1][1] == 0.0


def test_several_functions_sync_and_async_are_summed_by_weight():
    _, (_, reward, *_, info) = play("3", [exact, length], reward_weights=[1.0, 0.5])
    assert reward == pytest.approx(1.0 + 0.5 * 0.1)
    assert info["reward_parts"] == {"exact": 1.0, "length": 0.1}


def test_functions_get_what_trl_gives_them():
    seen = {}

    def spy(prompts, completions, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions)
        kwargs["log_metric"]("seen", 1)
        return [0]

    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = [{"prompt": prompt, "answer": "x", "level": 2}] * 4
    env, (*_, info) = play("Hello", spy, rows)
    assert seen["prompts"] == [prompt]
    assert seen["completions"] == [[{"role": "assistant", "content": "Hello"}]]
    assert (seen["answer"], seen["level"]) == (["x"], [2])
    assert [message.role for message in env.messages] == ["system", "user", "assistant"]
    assert info["reward_parts"] == {"seen": 1.0, "spy": 0.0}


def test_a_function_without_keyword_arguments_gets_the_columns_that_it_names():
    assert play("3", lambda completions, answer: [completions == answer])[1][1] == 1.0


def test_a_function_that_returns_none_is_left_out():
    _, (_, reward, *_, info) = play("3", [silent, exact])
    assert reward == 1.0
    assert info["reward_parts"] == {"exact": 1.0}


def test_a_function_that_gives_no_number_is_a_failure_and_no_reward():
    def crash(completions, **kwargs):
        raise KeyError("gold")

    assert "reward function crash raised KeyError: 'gold'" in failure([exact, crash])
    assert "nothing scores this task" in failure(silent)
    assert "returned nan" in failure(lambda completions, **kwargs: [float("nan")])
    assert "a list with one number" in failure(lambda completions, **kwargs: [1.0, 2.0])
    assert "a list with one number" in failure(lambda completions, **kwargs: 1.0)


def test_a_function_that_fails_ends_those_beside_it():
    ended = []

    async def patient(completions, **kwargs):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("patient")

    async def crash(completions, **kwargs):
        raise KeyError("gold")

    assert "reward function crash raised KeyError: 'gold'" in failure([patient, crash])
    assert ended == ["patient"]


def test_a_function_that_hangs_is_a_failure():
    gate = threading.Event()
    try:
        assert "took over 0.05 s" in failure(lambda completions, **kwargs: gate.wait(), reward_timeout_s=0.05)
    finally:
        gate.set()


def test_what_looks_like_a_tool_call_is_text_and_is_scored():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = Message("assistant", None, (ToolCall("c", "f", "{}"), ToolCall("d", "g", "{}")))
    for action in (text, parsed, "<tool_call>{broken"):
        env, (_, reward, terminated, *_) = play(action, lambda completions, **kwargs: ["tool_call" in completions[0]])
        assert (reward, terminated, env.turns) == (1.0, True, 1)


def test_reasoning_is_part_of_the_completion():
    said = Message("assistant", "3", reasoning="easy")
    check = lambda completions, **kwargs: [completions[0] == "<think>\neasy\n</think>\n\n3"]  # noqa: E731
    assert play(said, check)[1][1] == 1.0


@pytest.fixture
def files(tmp_path):
    """A folder of a data set, and a file of reward functions."""
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def exact(completions, answer, **kwargs):\n    return [float(completions == answer)]\n"
    )
    return tmp_path


def test_files_are_named_in_a_configuration_and_pass_gymnasiums_checker(files):
    kwargs = {"dataset": str(files), "reward_funcs": [f"{files}/rewards.py:exact"]}
    env = gymnasium.make("sparring/SingleTurn-v0", **json.loads(json.dumps(kwargs)))
    assert len(env.unwrapped.task_ids("train")) == 5
    assert len(env.unwrapped.task_ids("test")) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


def test_an_eval_dataset_is_the_test_split(files):
    env = SingleTurn(dataset=ROWS, eval_dataset=str(files / "test.jsonl"), reward_funcs=exact)
    assert len(env.task_ids("test")) == 2
    assert list(SingleTurn(dataset=ROWS, reward_funcs=exact).task_ids("test")) == []


@pytest.mark.slow
def test_a_datasets_dataset_is_taken_as_it_is():
    datasets = pytest.importorskip("datasets")
    assert play("3", rows=datasets.Dataset.from_list(ROWS))[1][1] == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "has no 'prompt'"),
        ({"prompt": ""}, "a text or a list of messages"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "text as content"),
        ({"prompt": [{"role": "critic", "content": "x"}]}, "has a role"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(files, row, message):
    (files / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(TaskError, match=r"train\.jsonl:2.*" + message):
        SingleTurn(dataset=files, reward_funcs=exact).task_ids("train")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"reward_funcs": exact}, "needs dataset="),
        ({"dataset": ROWS}, "at least one reward function"),
        ({"dataset": ROWS, "reward_funcs": [exact], "reward_weights": [1, 2]}, "2 of them for 1"),
        ({"dataset": ROWS, "reward_funcs": "rewards.py:f"}, "there is no file rewards.py"),
        ({"dataset": ROWS, "reward_funcs": lambda completions, completion_ids: [0]}, "needs 'completion_ids'"),
        ({"dataset": ROWS, "reward_funcs": ["exact"]}, "not of the form"),
    ],
)
def test_what_cannot_be_an_environment_says_so(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        SingleTurn(**kwargs)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"no file nowhere/rows\.jsonl"):
        SingleTurn(dataset="nowhere/rows.jsonl", reward_funcs=exact).task_ids()
