"""GSM8K: reading its files, finding an answer in a text, and bad data said clearly."""

import json

import pytest

from sparring.envs.gsm8k import GSM8K, extract_answer
from sparring.envs.hermes import format_call
from sparring.errors import ConfigError, TaskError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So \\boxed{5}.", "5"),
        ("First \\boxed{4}, no: \\boxed{5}", "5"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\text{\\$}1{,}200}", "1{,}200"),
        ("\\boxed{\\$1,200.50}", "1200.50"),
        ("\\boxed{18\\text{ eggs}}", "18"),
        ("\\boxed{18 eggs}", "18"),
        ("\\boxed{x = 18}", "18"),
        ("\\boxed{50\\%}", "50"),
        ("\\boxed{3/4}", "3/4"),
        ("\\boxed{-7}", "-7"),
        ("\\boxed{5", "5"),
        ("work #### 1,200", "1200"),
        ("The answer is $18.", "18"),
        ("the final Answer: 18 dollars, not 20", "18"),
        ("2 + 3 = 5.", "5"),
        ("It costs $1,234,567 then.", "1234567"),
        ("no number", ""),
        ("", ""),
    ],
)
def test_the_final_answer_is_found_and_normalised(text, answer):
    assert extract_answer(text) == answer


async def test_a_problem_is_asked_and_scored(gsm8k_folder):
    env = GSM8K(path=gsm8k_folder)
    observation, info = await env.areset(options={"task_id": "train/1"})
    assert observation == "Twice 600?"
    assert "\\boxed{}" in info["system"]
    assert info["tools"] == "[]"
    *_, terminated, truncated, info = await env.astep("It is \\boxed{1,200}.")
    assert (terminated, truncated, env.reward, info["reward_parts"]) == (True, False, 1.0, {"exact": 1.0})


async def test_the_solution_never_shows_its_annotations(gsm8k_folder):
    env = GSM8K(path=gsm8k_folder)
    await env.areset(options={"task_id": "train/0"})
    assert env.demonstration()[0].content == "2 + 3 = 5\n\\boxed{5}"


async def test_the_calculator_is_there_where_it_was_asked_for(gsm8k_folder):
    env = GSM8K(path=gsm8k_folder, calculator=True)
    await env.areset(options={"task_id": "train/0"})
    assert (await env.astep(format_call("calculator", {"expression": "2 + 3"})))[0] == "5"
    without = GSM8K(path=gsm8k_folder)
    await without.areset(options={"task_id": "train/0"})
    assert "this task has no tools" in (await without.astep(format_call("calculator", {"expression": "2 + 3"})))[0]


def test_the_data_is_found_by_environment_variable(sparring_data_env):
    assert len(GSM8K().task_ids("train")) == 2


def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"path names .*nowhere"):
        GSM8K(path=tmp_path / "nowhere")
    monkeypatch.setenv("SPARRING_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="SPARRING_DATA names"):
        GSM8K()


@pytest.mark.slow
def test_without_data_the_hub_is_asked_and_its_silence_explained(monkeypatch):
    monkeypatch.delenv("SPARRING_DATA", raising=False)
    monkeypatch.setattr("socket.socket.connect", _unreachable)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TaskError, match=r"env\.kwargs\.path\), or set SPARRING_DATA"):
        GSM8K().task_ids("train")


def _unreachable(*_):
    raise OSError("no network in tests")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "holds no problems"),
        ("{", r"train.jsonl:1 is not JSON"),
        ("[]", r"train.jsonl:1 lacks the text of a question or an answer"),
        (json.dumps({"question": "Why?"}), "lacks the text"),
        (json.dumps({"question": " ", "answer": "#### 1"}), "lacks the text"),
        (json.dumps({"question": "Why?", "answer": 5}), "lacks the text"),
        (json.dumps({"question": "Why?", "answer": "because"}), r"train.jsonl:1 has no number after ####"),
        (json.dumps({"question": "Why?", "answer": "#### because"}), "has no number after ####"),
    ],
)
def test_bad_data_names_file_and_line(tmp_path, line, problem):
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(TaskError, match=problem):
        GSM8K(path=tmp_path).task_ids("train")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"cannot read .*test.jsonl"):
        GSM8K(path=tmp_path).task_ids("test")


async def test_an_unknown_problem_names_the_nearest(gsm8k_folder):
    with pytest.raises(TaskError, match="no task 'train/2'; the nearest are"):
        await GSM8K(path=gsm8k_folder).areset(options={"task_id": "train/2"})


def test_changed_data_is_read_again(tmp_path, gsm8k_folder):
    env = GSM8K(path=gsm8k_folder)
    assert len(env.task_ids("test")) == 1
    test_file = gsm8k_folder / "test.jsonl"
    test_file.write_text(test_file.read_text() * 3)
    assert len(env.task_ids("test")) == 3
