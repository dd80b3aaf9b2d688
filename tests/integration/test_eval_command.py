"""`sparring eval`: local models and endpoints, half-done files, failures that are no misses, and what it refuses."""

import asyncio
import json
import os
import re
import shutil
import signal

import gymnasium
import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.gateway.http import GatewayServer
from sparring.backend.rollout.loop import LoopThread
from sparring.cli import main
from sparring.envs import ChatEnv
from sparring.errors import TaskError
from sparring.types import Message

KEY_LOOKUP = ("--env", "sparring/KeyLookup-v0")
LOCAL = ("--set", "model.tool_template=hermes-compact", "--set", "sampling.max_new_tokens=8", "--set",
         "engine.dtype=float32", "--set", "engine.in_process=true")  # fmt: skip


class Fragile(ChatEnv):
    """Task 0 breaks as it begins, task 1 never begins, in all others every answer is right."""

    def task_ids(self, split="train"):
        return [f"{split}/{i}" for i in range(4)]

    async def _begin(self, task_id):
        if task_id.endswith("/0"):
            raise TaskError("this task's container is gone")
        if task_id.endswith("/1"):
            await asyncio.Event().wait()
        return [Message("user", "Speak.")]

    async def _submit(self, answer):
        self.reward = 1.0


gymnasium.register("test/Fragile-v0", entry_point=Fragile)


class Interrupting(Fragile):
    """Ctrl-C is pressed as the third task begins, once."""

    pressed = False

    async def _begin(self, task_id):
        if task_id.endswith("/2") and not Interrupting.pressed:
            Interrupting.pressed = True
            os.kill(os.getpid(), signal.SIGINT)
        return [Message("user", "Speak.")]


gymnasium.register("test/Interrupting-v0", entry_point=Interrupting)


def evaluate(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["eval", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def oracle(chat: ChatFormat):
    """A script that solves KeyLookup."""

    def reply(token_ids):
        text = chat.decode(token_ids, special_tokens=True)
        key = re.search(r"Look up (\w+)", text)
        value = re.search(r"\d+", text.rpartition("</tool_call>")[2]) if "</tool_call>" in text else None
        said = f'<tool_call>{{"name": "lookup", "arguments": {{"key": "{key[1]}"}}}}</tool_call>' if key else "Hello."
        return chat.encode_reply([Message("user", "x")], Message("assistant", value[0] if value else said))

    return reply


@pytest.fixture
def endpoint(tiny_qwen3):
    """An OpenAI-compatible endpoint over the gateway: (base_url, key, engine)."""
    chat = ChatFormat.load(tiny_qwen3, tool_template="hermes-compact")
    engine = ScriptedEngine(oracle(chat))
    recorder = Recorder(engine, chat, SamplingParams(), max_length=4096)
    server = GatewayServer(recorder)
    loop = LoopThread("endpoint")
    loop.start()

    async def begin():
        await engine.start()
        await server.start()
        session = recorder.open_session("all", turn_budget=10**6, token_budget=10**6, evaluation=SamplingParams())
        return server.base_url, session.api_key, recorder

    async def end():
        await server.stop()
        await recorder.aclose()
        await engine.stop()

    yield loop.run(begin(), 20)
    loop.run(end(), 20)
    loop.stop(10)


@pytest.fixture
def remote(endpoint, monkeypatch):
    monkeypatch.setenv("TEST_KEY", endpoint[1])
    return ("policy", "--base-url", endpoint[0], "--api-key-env", "TEST_KEY", *KEY_LOOKUP)


@pytest.mark.slow
def test_a_local_model_is_evaluated_and_a_finished_evaluation_is_only_shown_again(capsys, tmp_path):
    out = tmp_path / "e.jsonl"
    command = ("tiny-qwen3", *KEY_LOOKUP, "--episodes", "4", "--k", "2", *LOCAL, "--out", str(out))
    status, shown, _ = evaluate(capsys, *command)
    assert status == 0
    assert "0 of 4" in shown  # failed
    assert {(row["task_id"], row["sample"]) for row in rows(out)} == {(f"test/{i}", j) for i in (0, 1) for j in (0, 1)}
    assert all(row["env"] == "sparring/KeyLookup-v0" and row["completion_tokens"] for row in rows(out))
    before = out.read_bytes()
    _, again, _ = evaluate(capsys, *command)
    assert out.read_bytes() == before
    assert "played" not in again
    assert shown.endswith(again)


@pytest.mark.slow
def test_the_deterministic_engine_repeats_an_evaluation_however_many_play_at_once(capsys, tmp_path):
    said = []
    for at_once in ("1", "8"):
        out = tmp_path / f"{at_once}.jsonl"
        arguments = ("--set", "engine.deterministic=true", "--concurrency", at_once, "--out", str(out))
        status, _, error = evaluate(capsys, "tiny-qwen3", *KEY_LOOKUP, "--episodes", "8", *LOCAL, *arguments)
        assert status == 0, error
        said.append({row["task_id"]: row["messages"] for row in rows(out)})
    assert len(said[0]) == 8
    assert said[0] == said[1]


@pytest.mark.slow
def test_a_half_done_evaluation_plays_what_is_missing_and_gives_what_a_whole_one_gives(capsys, tmp_path):
    command = ("tiny-qwen3", *KEY_LOOKUP, "--episodes", "6", "--temperature", "1", *LOCAL, "--out")
    whole, half = tmp_path / "whole.jsonl", tmp_path / "half.jsonl"
    _, shown, _ = evaluate(capsys, *command, str(whole))
    lines = whole.read_text().splitlines(keepends=True)
    half.write_text("".join(lines[:3]) + lines[3][:40])  # killed while it wrote the third
    _, again, _ = evaluate(capsys, *command, str(half))
    assert half.read_text().startswith("".join(lines[:3]))
    said = {row["task_id"]: row["messages"] for row in rows(whole)}
    assert {row["task_id"]: row["messages"] for row in rows(half)} == said
    assert len(rows(half)) == 6
    assert again.splitlines()[-3:] == shown.splitlines()[-3:]


@pytest.mark.slow
def test_failures_and_deadlines_are_counted_apart_and_tried_again(capsys, tmp_path):
    out = tmp_path / "e.jsonl"
    command = ("tiny-qwen3", "--env", "test/Fragile-v0", *LOCAL, "--deadline", "0.5", "--out", str(out))
    status, shown, _ = evaluate(capsys, *command)
    assert status == 0
    assert re.search(r"1 +2 +100\.0%", shown)  # both tasks that could be played are solved
    assert "2 of 4" in shown
    assert "1 failed by task, such as: " in shown
    assert "1 failed by deadline, such as: " in shown
    assert {row["task_id"]: row["reward"] for row in rows(out)} == {
        "test/0": None, "test/1": None, "test/2": 1.0, "test/3": 1.0
    }  # fmt: skip
    played = len(rows(out))
    evaluate(capsys, *command)
    assert {row["task_id"] for row in rows(out)[played:]} == {"test/0", "test/1"}


@pytest.mark.slow
def test_an_endpoint_solves_with_tools(capsys, tmp_path, remote, endpoint):
    out = tmp_path / "e.jsonl"
    status, shown, error = evaluate(capsys, *remote, "--episodes", "6", "--k", "2", "--out", str(out))
    assert (status, error) == (0, "")
    assert [row["solved"] for row in rows(out)] == [True] * 6
    assert {row["turns"] for row in rows(out)} == {2}
    assert [message["role"] for message in rows(out)[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert re.search(r"1 +3 +100\.0%", shown)
    assert endpoint[1] not in shown + out.read_text()


def test_environments_are_evaluated_apart(capsys, tmp_path, remote):
    out = tmp_path / "e.jsonl"
    more = ("--episodes", "2", "--env", "sparring/KeyLookup-v0", "--env-arg", "length=2", "--out", str(out))
    _, shown, _ = evaluate(capsys, *remote, *more)
    assert {row["env"] for row in rows(out)} == {"sparring/KeyLookup-v0", "sparring/KeyLookup-v0(length=2)"}
    assert "sparring/KeyLookup-v0(length=2)" in shown


def test_an_evaluation_may_grow_but_not_change(capsys, tmp_path, remote):
    out = ("--out", str(tmp_path / "e.jsonl"))
    evaluate(capsys, *remote, "--episodes", "2", *out)
    evaluate(capsys, *remote, "--episodes", "4", *out)
    assert {row["task_id"] for row in rows(tmp_path / "e.jsonl")[:2]} == {"test/0", "test/1"}
    assert len(rows(tmp_path / "e.jsonl")) == 4
    status, _, error = evaluate(capsys, *remote, "--episodes", "2", "--split", "train", *out)
    assert status == 2
    assert "holds an evaluation with split='test', not 'train'; choose another file" in error


def test_a_wrong_key_is_found_before_the_first_episode_and_never_shown(capsys, tmp_path, remote, monkeypatch):
    monkeypatch.setenv("TEST_KEY", "sk-secret-and-wrong")
    status, shown, error = evaluate(capsys, *remote, "--episodes", "2", "--out", str(tmp_path / "e.jsonl"))
    assert status == 2
    assert "are --base-url, the key and the model's name right?" in error
    assert "sk-secret" not in shown + error
    assert rows(tmp_path / "e.jsonl") == []


def test_nothing_at_the_address_is_an_error_that_names_it(capsys):
    arguments = ("gpt", "--base-url", "http://127.0.0.1:9/v1", *KEY_LOOKUP, "--episodes", "1")
    status, _, error = evaluate(capsys, *arguments)
    assert status == 2
    assert "model 'gpt' at http://127.0.0.1:9/v1" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--episodes", "3", "--k", "2"], "no multiple of --k 2"),
        (["--episodes", "2", "--k", "2", "--greedy"], "greedy tries of a task differ by rounding at most"),
        (["--episodes", "2000"], "has 1000 tasks, 1000 episodes at most"),
        (["--split", "dev"], "KeyLookup has no split 'dev'; it has train, test"),
        (["--env-arg", "lenth=3"], "takes no 'lenth'; did you mean length?"),
        (["--env", "sparring/KeyLookup-v0"], "given twice"),
        (["--temperature", "-1"], "a number from 0 on"),
        (["--set", "engine.slot=3"], "did you mean engine.slots?"),
        (["--policy", "nowhere.py:make", "--episodes", "1"], "there is no file nowhere.py"),
    ],
)
def test_what_cannot_be_evaluated_says_so(capsys, remote, arguments, message):
    status, _, error = evaluate(capsys, *remote, *arguments)
    assert status == 2
    assert message in error


@pytest.mark.parametrize(
    ("make", "model", "expected"),
    [
        ((), "runs/quickstart", r"there is no folder \S+/runs/quickstart: neither a run nor a model"),
        (("runs/mine", "runs/other"), "runs/quickstart", "neither a run nor a model; runs holds mine, other"),
        (("models/small",), "models/large", "models holds small"),
        (("runs/empty",), "runs/empty", r"neither a run \(it lacks config.yaml or buffer.sqlite\) nor a model"),
        ((), "./anywhere", "there is no folder"),
        ((), "/no/such/folder/anywhere", "there is no folder /no/such/folder/anywhere"),
    ],
)
def test_a_run_that_is_not_there_is_named_before_a_hub_is_asked(
    capsys, tmp_path, monkeypatch, make, model, expected
):
    def ask(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    monkeypatch.chdir(tmp_path)
    for folder in make:
        (tmp_path / folder).mkdir(parents=True)
    status, _, error = evaluate(capsys, model, "--env", "sparring/KeyLookup-v0")
    assert status == 2
    assert re.search(expected, error), error


def test_a_hubs_model_is_still_asked_for(capsys, tmp_path, monkeypatch):
    def ask(name, **kwargs):
        raise OSError(f"no network for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    monkeypatch.setattr("sparring.backend.models.hub_answers", lambda: True)
    monkeypatch.chdir(tmp_path)
    assert "no network for Qwen/Qwen3-0.6B" in evaluate(capsys, "Qwen/Qwen3-0.6B", *KEY_LOOKUP)[2]


def test_a_tool_template_is_asked_for_where_an_environment_has_tools(capsys):
    """`test_an_interrupted_evaluation_goes_on_where_it_was` needs none."""
    status, _, error = evaluate(capsys, "tiny-qwen3", *KEY_LOOKUP, "--episodes", "1", *LOCAL[2:])
    assert status == 2
    assert "ignores tools; choose one that is shipped" in error


def test_without_an_environment_there_is_nothing_to_evaluate(capsys):
    assert "--env is needed" in evaluate(capsys, "tiny-qwen3")[2]


def test_a_file_of_something_else_is_not_overwritten(capsys, tmp_path, remote):
    other = tmp_path / "notes.jsonl"
    other.write_text('{"text": "mine"}\n')
    assert "holds something else" in evaluate(capsys, *remote, "--episodes", "1", "--out", str(other))[2]
    assert other.read_text() == '{"text": "mine"}\n'


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_where_it_was(capsys, tmp_path):
    out = tmp_path / "e.jsonl"
    command = ("tiny-qwen3", "--env", "test/Interrupting-v0", *LOCAL[2:], "--concurrency", "1", "--out", str(out))
    status, shown, _ = evaluate(capsys, *command)
    assert status == 130
    assert f"the same command goes on with the 2 episodes in {out}" in shown.replace("\n", "")
    assert [row["task_id"] for row in rows(out)] == ["test/0", "test/1"]
    assert evaluate(capsys, *command)[0] == 0
    assert [row["task_id"] for row in rows(out)] == ["test/0", "test/1", "test/2", "test/3"]


def test_an_agent_that_speaks_http_itself_is_refused_at_an_endpoint(capsys, remote, tmp_path):
    policy = tmp_path / "policy.py"
    policy.write_text(
        "from sparring.agents.remote import served_at\n"
        "class make:\n    async def play(self, env, client):\n        served_at(client)\n"
    )
    status, _, error = evaluate(capsys, *remote, "--episodes", "1", "--policy", f"{policy}:make")
    assert status == 2
    assert "this agent speaks HTTP" in error


@pytest.mark.slow
def test_a_run_stands_for_its_newest_model_and_its_environment(capsys, tmp_path, tiny_qwen3):
    run, out = tmp_path / "run", tmp_path / "e.jsonl"
    for name in ("checkpoint-9", "checkpoint-10"):
        shutil.copytree(tiny_qwen3, run / name)
    document = {"model": {"path": "elsewhere", "tool_template": "hermes-compact", "max_length": 200},
                "env": {"id": "sparring/KeyLookup-v0", "kwargs": {"length": 2}},
                "engine": {"dtype": "float32", "in_process": True}, "sampling": {"max_new_tokens": 8}}  # fmt: skip
    (run / "config.yaml").write_text(json.dumps(document))
    assert "is neither a run" in evaluate(capsys, str(run))[2]
    (run / "buffer.sqlite").touch()
    assert evaluate(capsys, str(run), "--episodes", "2", "--out", str(out))[0] == 0
    header = json.loads(out.read_text().splitlines()[0])["evaluation"]
    assert header["model"].endswith("run/checkpoint-10")
    assert rows(out)[0]["env"] == "sparring/KeyLookup-v0(length=2)"
    _, shown, _ = evaluate(capsys, str(run / "checkpoint-9"), "--episodes", "1")
    assert "checkpoint-9" in shown
