"""Calculator: its prompt, its problems, and what is worth what."""

import random
import re

import pytest

from sparring.envs.arithmetic import evaluate
from sparring.envs.calculator import _MAKERS, Calculator
from sparring.envs.hermes import format_call
from sparring.errors import ConfigError


def call(expression):
    return format_call("calculator", {"expression": expression})


@pytest.fixture
async def env():
    env = Calculator()
    await env.areset(options={"task_id": "train/0"})
    return env


def gold(env):
    call_message, _, answer = env.demonstration()
    return call_message.tool_calls[0].arguments.split('"')[3], answer.content


async def test_the_prompt_is_the_one_that_a_small_model_learns_from(env):
    contents = [(message.role, message.content) for message in env.messages]
    assert contents[:-1] == [
        ("system", "You solve problems with a calculator. First call it, then give the answer."),
        ("user", "Mia has 14 cups and buys 9 more. How many cups does Mia have?"),
        ("assistant", None),
        ("tool", "23"),
        ("assistant", "Answer: 23"),
    ]
    (example,) = env.messages[2].tool_calls
    assert (example.name, example.arguments) == ("calculator", '{"expression": "14 + 9"}')


@pytest.mark.parametrize(
    ("steps", "reward", "exact"),
    [
        (["{right}", "{answer}"], 1.0, 1.0),
        (["{right}", "The result. {answer}."], 1.0, 1.0),
        (["{right}", "Answer: -1"], 0.4, 0.0),
        (["{right}", "no answer"], 0.4, 0.0),
        (["{right}", "Answer: " + "9" * 5000], 0.4, 0.0),
        (["{right}", "Answer: ٣"], 0.4, 0.0),
        (["{wrong}", "{answer}"], 0.1, 0.0),
        (["{wrong}", "{right}", "{answer}"], 1.0, 1.0),
        (["{error}", "{answer}"], 0.0, 0.0),
        (["{answer}"], 0.0, 0.0),
        (["<tool_call>{{", "{right}", "{answer}"], 1.0, 1.0),
        (["{right}", "{right}", "{right}", "{right}"], 0.4, 0.0),
    ],
)
async def test_what_is_worth_what(env, steps, reward, exact):
    expression, answer = gold(env)
    names = {"right": call(expression), "wrong": call("1 + 1"), "error": call("1 +"), "answer": answer}
    for step in steps:
        *_, info = await env.astep(step.format(**names))
    assert env.done
    assert (env.reward, info["reward_parts"]["exact"]) == (reward, exact)
    assert sum(env.turn_rewards) == pytest.approx(reward)


async def test_a_hostile_expression_comes_back_as_an_observation(env):
    for expression in ("9**9**9**9", "__import__('os')", "(" * 1000, "٣"):
        observation, reward, terminated, truncated, _ = await env.astep(call(expression))
        assert observation.startswith("Error: ")
        assert (reward, terminated) == (0.0, False)
    assert truncated  # the fourth turn was the last


@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_problems_expression_gives_its_answer_from_numbers_in_the_question(level):
    for number in range(500):
        problem = _MAKERS[level](random.Random(f"problem {number}"))
        assert evaluate(problem.expression) == problem.answer
        assert problem.answer >= 0
        assert set(re.findall(r"\d+", problem.expression)) <= set(re.findall(r"\d+", problem.question))


def test_an_easy_problem_takes_one_operation_and_a_hard_one_three():
    for level in (1, 2, 3):
        problem = _MAKERS[level](random.Random(0))
        assert len(re.findall(r" [+\-*/] ", problem.expression)) == level


async def test_train_and_test_draw_from_different_streams():
    env = Calculator()
    questions = {}
    for split in ("train", "test"):
        resets = [await env.areset(options={"task_id": f"{split}/{n}"}) for n in range(30)]
        questions[split] = [info["messages"][-1]["content"] for _, info in resets]
    assert len(set(questions["train"])) == 30
    assert not set(questions["train"]) & set(questions["test"])


def test_the_splits_have_their_sizes_and_an_unknown_level_is_refused():
    assert len(Calculator().task_ids("train")) == 100_000
    assert len(Calculator().task_ids("test")) == 1_000
    with pytest.raises(ConfigError, match="levels 1, 2, 3"):
        Calculator(level=4)
