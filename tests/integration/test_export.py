"""A run's rewarded episodes go out as JSONL and come back as the sequences that were sampled."""

import json

import pytest

from sparring.agents.native import NativePolicy
from sparring.agents.runner import make_runner
from sparring.backend.buffer import GroupSpec, TrajectoryBuffer
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.rollout.episode import EpisodePlayer
from sparring.chat_data import read_sequences
from sparring.cli import main
from sparring.config import RolloutConfig
from sparring.config_file import load_config
from sparring.envs.key_lookup import KeyLookup
from sparring.errors import ConfigError, TaskError

CONFIG = "model: {path: tiny-qwen3, tool_template: hermes-compact}\nenv: {id: sparring/KeyLookup-v0}\n"


@pytest.fixture
def chat(tiny_qwen3):
    return ChatFormat.load(tiny_qwen3, tool_template="hermes-compact")


async def gold_replies(chat: ChatFormat, task_id: str) -> list[list[int]]:
    env = KeyLookup()
    await env.areset(options={"task_id": task_id})
    history, replies = list(env.messages), []
    for message in env.demonstration():
        if message.role == "assistant":
            replies.append(chat.encode_reply(history, message, env.tools))
        history.append(message)
    return replies


@pytest.fixture
async def run(tmp_path, chat):
    """A run folder with three training episodes, rewards 1, 0 and 1, and a held-out one, as the worker plays them."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    buffer = TrajectoryBuffer.open(folder / "buffer.sqlite")
    buffer.begin(0)
    runner = make_runner("sparring/KeyLookup-v0", {}, NativePolicy(), timeout_s=30)
    for seq, (split, solves) in enumerate([("train", True), ("train", False), ("train", True), ("test", True)]):
        task_id = f"{split}/{seq}"
        replies = await gold_replies(chat, task_id) if solves else [list(b"no"), list(b"no"), list(b"no")]
        engine = ScriptedEngine([[*reply, *chat.end_ids[:1]] if not solves else reply for reply in replies])
        await engine.start()
        recorder = Recorder(engine, chat, SamplingParams(), max_length=1024)
        spec = GroupSpec(seq, f"g{seq}", "sparring/KeyLookup-v0", task_id, seed=0, size=1, split=split)
        if split == "train":
            buffer.start_group(spec)
        trajectory = await EpisodePlayer(recorder, runner, RolloutConfig()).play(spec.episode(0))
        buffer.store(trajectory, evaluation=split == "test")
        await recorder.aclose()
    buffer.close()
    return folder


async def test_rewarded_training_episodes_come_back_as_they_were_sampled(run, chat, tmp_path, capsys):
    sequences = {}
    for form in ("chat", "tokens"):
        out = tmp_path / f"{form}.jsonl"
        assert main(["export", str(run), "--format", form, "--min-reward", "1", "--out", str(out)]) == 0
        assert f"wrote 2 lines of 2 episodes to {out}: 2 left in the buffer" in capsys.readouterr().out
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row["task_id"], row["reward"]) for row in rows] == [("train/0", 1.0), ("train/2", 1.0)]
        sequences[form] = await read_sequences(out, chat, max_length=512)
    for encoded, sampled in zip(sequences["chat"], sequences["tokens"], strict=True):
        assert encoded.token_ids.tolist() == sampled.token_ids.tolist()
        assert encoded.action_mask.tolist() == sampled.action_mask.tolist()
        assert [(turn.start, turn.end) for turn in encoded.turns] == [(turn.start, turn.end) for turn in sampled.turns]


def test_chat_rows_stand_alone(run, tmp_path):
    out = tmp_path / "chat.jsonl"
    main(["export", str(run), "--min-reward", "0.5", "--out", str(out)])
    row = json.loads(out.read_text().splitlines()[0])
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["tools"][0]["function"]["name"] == "lookup"


def test_a_reward_that_none_has_is_an_error_that_names_the_best(run, tmp_path, capsys):
    out = tmp_path / "none.jsonl"
    assert main(["export", str(run), "--min-reward", "2", "--out", str(out)]) == 2
    assert "none of the 3 training episodes" in capsys.readouterr().err
    assert not out.exists()


def test_a_file_that_is_there_is_replaced_only_when_told_to(run, tmp_path, capsys):
    out = tmp_path / "mine.jsonl"
    out.write_text("precious\n")
    command = ["export", str(run), "--min-reward", "1", "--out", str(out)]
    assert main(command) == 2
    assert f"--out: {out} exists already; choose another file, or add --overwrite" in capsys.readouterr().err
    assert out.read_text() == "precious\n"
    assert main([*command, "--overwrite"]) == 0
    assert len(out.read_text().splitlines()) == 2
    assert main(["export", str(run), "--min-reward", "1", "--out", "/dev/null"]) == 0
    assert "wrote 2 lines" in capsys.readouterr().err


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert main(["export", str(tmp_path), "--min-reward", "1", "--out", str(tmp_path / "x")]) == 2
    assert "is no run folder" in capsys.readouterr().err


async def test_conversations_of_other_makers_are_read_and_those_that_are_too_long_left_out(chat, tmp_path):
    data = tmp_path / "data.jsonl"
    user, said = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    again = {"role": "user", "content": "Sure?"}
    long = {"role": "assistant", "content": "4" * 100}
    rows = [{"messages": [user, said, again, said]}, {"messages": [user, long]}]
    data.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    (sequence,) = await read_sequences(data, chat, max_length=120)
    spoken = [chat.decode(sequence.token_ids[turn.start : turn.end], special_tokens=True) for turn in sequence.turns]
    assert spoken == ["4<|im_end|>", "4<|im_end|>"]
    assert sequence.action_mask.sum() == 4
    with pytest.raises(TaskError, match=r"no conversation within model\.max_length=20"):
        await read_sequences(data, chat, max_length=20)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"data\.jsonl:2 is not JSON"),
        ('{"text": "x"}', r"data\.jsonl:2 has neither 'messages' nor 'token_ids'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message is the assistant's"),
        ('{"messages": [{"role": "cat"}]}', "role"),
        ('{"token_ids": [1]}', "action_mask"),
    ],
)
async def test_a_row_that_cannot_be_read_is_named(chat, tmp_path, line, message):
    data = tmp_path / "data.jsonl"
    good = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    data.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(TaskError, match=message):
        await read_sequences(data, chat, max_length=512)
    with pytest.raises(ConfigError, match="cannot read"):
        await read_sequences(tmp_path / "nothing.jsonl", chat, max_length=512)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_starts_warm_from_exported_episodes(run, tmp_path, capsys):
    data, config = tmp_path / "chat.jsonl", tmp_path / "warm.yaml"
    main(["export", str(run), "--min-reward", "1", "--out", str(data)])
    config.write_text(CONFIG)
    warm = (
        f"warm_start.data={data} warm_start.steps=30 warm_start.batch_size=2 model.max_length=256 "
        "sampling.max_new_tokens=60 rollout.groups_per_step=1 rollout.group_size=2 rollout.max_refill=0 "
        f"trainer.steps=1 eval.tasks=1 engine.dtype=float32 trainer.dtype=float32 run_dir={tmp_path}/warm"
    )
    main(["train", str(config), *warm.split()])  # whether its one step finds signal is not the point
    shown = capsys.readouterr().out
    assert "30 supervised steps on 2 sequences" in shown
    before, after = shown.partition("warm start: loss ")[2].split(" nats")[0].split(" -> ")
    assert float(after) < 0.5 * float(before)
    assert load_config(config).config.warm_start.data is None
