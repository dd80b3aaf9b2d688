"""`sparring sft` and `sparring dpo` end to end: a run's buffer, a tiny model, and what it says afterwards."""

import json
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from sparring.agents.native import NativePolicy
from sparring.agents.runner import make_env, make_runner
from sparring.backend.buffer import BufferView, GroupSpec, TrajectoryBuffer
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.rollout.episode import EpisodePlayer
from sparring.backend.trainer.packing import split_rows
from sparring.backend.trainer.passes import score_rows
from sparring.backend.trainer.policy import load_policy
from sparring.backend.trainer.step import make_sample
from sparring.cli import main
from sparring.config import RolloutConfig

pytestmark = pytest.mark.slow

ENV = "sparring/KeyLookup-v0"
TASKS = 4


@pytest.fixture(scope="module")
def chat(tiny_qwen3):
    return ChatFormat.load(tiny_qwen3, tool_template="hermes-compact")


@pytest.fixture
async def run(tmp_path, chat, tiny_qwen3):
    """A run folder whose groups hold a solved episode (two turns, a tool's result between) and a missed one each."""
    folder = tmp_path / "run"
    folder.mkdir()
    document = {
        "model": {"path": str(tiny_qwen3), "tool_template": "hermes-compact", "max_length": 512},
        "env": {"id": ENV},
        "trainer": {"dtype": "float32"},
    }
    (folder / "config.yaml").write_text(json.dumps(document))
    buffer = TrajectoryBuffer.open(folder / "buffer.sqlite")
    buffer.begin(0)
    runner, env = make_runner(ENV, {}, NativePolicy(), timeout_s=30), make_env(ENV, {})
    for seq in range(TASKS):
        spec = GroupSpec(seq, f"g{seq}", ENV, f"train/{seq}", seed=0, size=2)
        await env.areset(seed=0, options={"task_id": spec.task_id})
        gold, history = [], list(env.messages)
        for message in env.demonstration():
            if message.role == "assistant":
                gold.append(chat.encode_reply(history, message, env.tools))
            history.append(message)
        buffer.start_group(spec)
        for member, replies in enumerate((gold, [[*b"I do not know", *chat.end_ids[:1]]] * 8)):
            engine = ScriptedEngine(replies)
            await engine.start()
            recorder = Recorder(engine, chat, SamplingParams(temperature=0.7), max_length=512)
            trajectory = await EpisodePlayer(recorder, runner, RolloutConfig()).play(spec.episode(member))
            buffer.store(trajectory)
            await recorder.aclose()
        buffer.accept_group(spec.group_id)
    await env.aclose()
    buffer.close()
    return folder


def logprobs(model_folder, run) -> dict[float, float]:
    """The mean log-probability, under a model, of what the episodes of each reward said."""
    model, _ = load_policy(model_folder, torch.float32)
    means: dict[float, list[float]] = {}
    with BufferView(run / "buffer.sqlite") as view:
        for row in view.episodes(limit=-1):
            trajectory = view.trajectory(row.episode_id)
            for sequence in trajectory.sequences:
                sample = make_sample(sequence, np.zeros(len(sequence.turns)), version=0)
                (scored,) = score_rows(model, split_rows([sample], 4096), torch.device("cpu")).values()
                means.setdefault(trajectory.reward, []).append(float(scored[1].mean()))
    return {reward: float(np.mean(values)) for reward, values in means.items()}


def ledger(run) -> list:
    with BufferView(run / "buffer.sqlite") as view:
        return view.ledger()


def test_rejection_sampling_learns_what_was_rewarded(run, tiny_qwen3, chat, tmp_path, capsys):
    before, fates = logprobs(tiny_qwen3, run), ledger(run)
    assert set(before) == {0.0, 1.0}
    out = tmp_path / "sft"
    command = ["sft", str(run), "--min-reward", "1", "--out", str(out), "--learning-rate", "3e-3", "--epochs", "30"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"{TASKS} sequences of {TASKS} episodes of {TASKS} tasks" in shown
    assert "30 steps, loss 5." in shown
    after = logprobs(out, run)
    assert after[1.0] > before[1.0] + 2.0
    assert after[1.0] > after[0.0]
    assert AutoTokenizer.from_pretrained(out).chat_template == chat.template
    about = json.loads((out / "fine_tuning.json").read_text())
    assert (about["method"], about["sequences"], len(about["losses"])) == ("sft", TASKS, 30)
    assert ledger(run) == fates
    assert main(command) == 2
    assert "exists already; choose another folder, or add --overwrite" in capsys.readouterr().err
    (out / "fine_tuning.json").unlink()
    assert main([*command[:-1], "1", "--overwrite"]) == 0
    assert (out / "fine_tuning.json").is_file()


def test_preference_pairs_teach_to_tell_good_from_bad(run, tiny_qwen3, tmp_path, capsys):
    before, fates = logprobs(tiny_qwen3, run), ledger(run)
    out = tmp_path / "dpo"
    command = ["dpo", str(run), "--out", str(out), "--learning-rate", "3e-4", "--epochs", "8", "--batch-size", "2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of a library, which a user can do nothing about
        assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"{TASKS} pairs of {TASKS} groups" in shown
    assert "16 steps, loss 0.693 -> " in shown
    after = logprobs(out, run)
    assert after[1.0] - after[0.0] > before[1.0] - before[0.0] + 0.3
    about = json.loads((out / "fine_tuning.json").read_text())
    assert about["steps"][-1]["rewards/accuracies"] == 1.0
    assert about["steps"][-1]["loss"] < 0.3
    assert ledger(run) == fates


def test_what_was_made_can_be_evaluated_and_fine_tuned_again(run, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["sft", str(run), "--min-reward", "1", "--out", str(first)]) == 0
    assert main(["dpo", str(run), "--out", str(second), "--model", str(first)]) == 0
    settings = ["model.tool_template=hermes-compact", "model.max_length=256", "sampling.max_new_tokens=16"]
    options = [text for setting in settings for text in ("--set", setting)]
    assert main(["eval", str(second), "--env", ENV, "--episodes", "2", *options]) == 0
    assert "KeyLookup" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sft", "RUN", "--min-reward", "3", "--out", "OUT"], "the best reward is 1.0"),
        (["sft", "RUN", "--min-reward", "1", "--out", "OUT", "--epochs", "0"], "--epochs and --batch-size"),
        (["sft", "RUN", "--min-reward", "1", "--out", "OUT", "--per-task", "0"], "--per-task 0"),
        (["sft", "RUN", "--min-reward", "1", "--out", "OUT", "--model", "/nowhere"], "/nowhere"),
        (["sft", "nowhere", "--min-reward", "1", "--out", "OUT"], "is no run folder"),
        (["dpo", "RUN", "--out", "OUT", "--min-gap", "2"], "differ in reward by 2"),
        (["dpo", "RUN", "--out", "OUT", "--beta", "0"], "--beta is above 0"),
    ],
)
def test_what_cannot_be_fine_tuned_says_why_and_leaves_nothing(run, tmp_path, capsys, arguments, expected):
    out = tmp_path / "out"
    assert main([{"RUN": str(run), "OUT": str(out)}.get(a, a) for a in arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not out.exists()
