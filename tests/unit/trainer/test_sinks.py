"""Numbers of a run in tensorboard, wandb and trackio: read back from what those wrote. None of them can end a run that
has begun."""

import importlib.util
import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import threading
import time

import pytest

from sparring.backend.trainer.sinks import _SINKS, Sinks
from sparring.backend.trainer.trainer import AgentTrainer
from sparring.cli import main
from sparring.config import AgentConfig, EngineConfig
from sparring.errors import ConfigError

RECORDS = [
    {"step": 1, "kind": "step", "loss": 0.5, "groups": 4, "name": "no number"},
    {"step": 2, "kind": "step", "loss": 0.25, "groups": 4},
    {"step": 2, "kind": "evaluation", "success": 0.75},
]


def write(config, run_dir, records=RECORDS, resume_from=None):
    sinks = Sinks(config, run_dir, resume_from)
    for record in records:
        sinks.write(record)
    sinks.close()
    sinks.close()


def scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_by_step(kit, tmp_path):
    pytest.importorskip("tensorboard")
    write(kit.make_config(report_to=["tensorboard"]), tmp_path)
    assert scalars(tmp_path) == {"loss": [(1, 0.5), (2, 0.25)], "groups": [(1, 4), (2, 4)], "eval/success": [(2, 0.75)]}


def test_tensorboard_hides_the_steps_that_happen_again_after_a_resume(kit, tmp_path):
    pytest.importorskip("tensorboard")
    config = kit.make_config(report_to=["tensorboard"])
    write(config, tmp_path)
    write(config, tmp_path, [{"step": 2, "kind": "step", "loss": 0.125}], resume_from=1)
    assert scalars(tmp_path)["loss"] == [(1, 0.5), (2, 0.125)]


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False])
def test_a_run_reports_each_of_its_records(tiny_qwen3, tmp_path, kit, given):
    pytest.importorskip("tensorboard")
    config = kit.make_config(report_to=["tensorboard"], steps=2)
    sinks = Sinks(config, tmp_path, None) if given else None
    AgentTrainer(tiny_qwen3, config, kit.source(), kit.KeepingPublisher(), run_dir=tmp_path, sinks=sinks).train()
    if sinks is not None:
        sinks.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = scalars(tmp_path)
    for name in ("loss", "grad_norm", "entropy"):
        assert found[name] == [(r["step"], pytest.approx(r[name], rel=1e-6)) for r in records]


def wandb_records(content):
    """The records of a `.wandb` file: a LevelDB log behind a header of 7 bytes."""
    at, data = 7, b""
    while at + 7 <= len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        data += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield data
            data = b""


@pytest.mark.slow
def test_wandb_offline_has_the_numbers_and_no_free_form_argument(kit, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    secret = {"agent": AgentConfig(kwargs={"key": "hunter2"}), "engine": EngineConfig(environment={"KEY": "hunter2"})}
    write(kit.make_config(report_to=["wandb"]).model_copy(update=secret), tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert (tmp_path / "wandb_id").read_text() in file.name

    def history():
        found = []
        for record in map(Record.FromString, wandb_records(file.read_bytes())):
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                found.append({name: value for name, value in items.items() if not name.startswith("_")})
        return found

    deadline = time.monotonic() + 20
    while len(history()) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of wandb's own writes the file
    assert history() == [
        {"step": 1, "loss": 0.5, "groups": 4},
        {"step": 2, "loss": 0.25, "groups": 4},
        {"step": 2, "eval/success": 0.75},
    ]
    assert b"learning_rate" in file.read_bytes()
    assert b"hunter2" not in file.read_bytes()


TRACKIO = """
import json, sys
from pathlib import Path
from sparring.backend.trainer.sinks import Sinks
from sparring.config import RunConfig
config, run_dir, records = json.loads(sys.stdin.read())
sinks = Sinks(RunConfig.model_validate_json(config), Path(run_dir), None)
for record in records:
    sinks.write(record)
sinks.close()
"""


@pytest.mark.slow
def test_trackio_has_the_numbers_by_step(kit, tmp_path):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("pip install trackio")
    config = kit.make_config(report_to=["trackio"]).model_dump_json()
    subprocess.run(  # trackio reads its folder's name when it is imported
        [sys.executable, "-c", TRACKIO],
        input=json.dumps([config, str(tmp_path / "my-run"), RECORDS]),
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        check=True,
        timeout=120,
    )
    (file,) = (tmp_path / "trackio").rglob("sparring*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert [(name, step, json.loads(metrics)) for name, step, metrics in rows] == [
        ("my-run", 1, {"loss": 0.5, "groups": 4}),
        ("my-run", 2, {"loss": 0.25, "groups": 4}),
        ("my-run", 2, {"eval/success": 0.75}),
    ]


def test_a_service_that_does_not_begin_is_told_before_the_first_step(kit, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where the folder would be")
    with pytest.raises(ConfigError, match=r"report_to: tensorboard does not begin: FileExistsError: .*report_to=\[\]"):
        Sinks(kit.make_config(report_to=["tensorboard"]), tmp_path, None)


@pytest.mark.slow
def test_a_service_that_does_not_begin_ends_a_run_before_it_takes_its_folder(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    text = "model: {path: tiny-qwen3, tool_template: hermes}\nenv: sparring/KeyLookup-v0\nrun_dir: run\n"
    (tmp_path / "x.yaml").write_text(text + "trainer: {report_to: [tensorboard]}\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file where the folder would be")
    for _ in range(2):  # no run is in the folder: the same command starts one, without --resume
        assert main(["train", "x.yaml"]) == 2
        assert "trainer.report_to: tensorboard does not begin: FileExistsError" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tensorboard"]


def test_folders_made_for_a_service_that_does_not_begin_are_gone_again(kit, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")

    class Broken:
        def __init__(self, config, run_dir, resume_from):
            (run_dir / "wandb_id").touch()
            if run_dir.parent.name == "shared":
                (run_dir / "of-another").touch()
            raise OSError("no network")

    monkeypatch.setitem(_SINKS, "wandb", Broken)
    for run in ("runs/mine", "shared/mine"):
        with pytest.raises(ConfigError, match="wandb does not begin: OSError: no network"):
            Sinks(kit.make_config(report_to=["tensorboard", "wandb"]), tmp_path / run, None)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "shared", "shared/mine", "shared/mine/of-another",
    ]  # fmt: skip


@pytest.mark.slow
def test_wandb_without_a_login_is_told_at_once_and_the_others_that_had_begun_are_closed(kit, tmp_path):
    pytest.importorskip("wandb")
    code = (
        "import sys; from pathlib import Path; from sparring.config import RunConfig\n"
        "from sparring.backend.trainer.sinks import Sinks\n"
        "Sinks(RunConfig.model_validate_json(sys.stdin.read()), Path.cwd(), None)"
    )
    alone = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ended = subprocess.run(  # a home of its own: no key of whoever runs the test
        [sys.executable, "-c", code],
        input=kit.make_config(report_to=["tensorboard", "wandb"]).model_dump_json(),
        env={**alone, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    *_, told = ended.stderr.strip().splitlines()
    assert told.startswith(
        "sparring.errors.ConfigError: trainer.report_to: wandb does not begin: UsageError: No API key"
    )
    assert "trainer.report_to=[tensorboard]" in told
    assert scalars(tmp_path) == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_that_fails_in_mid_run_is_dropped_and_the_run_goes_on(kit, tmp_path, caplog):
    pytest.importorskip("tensorboard")
    others = set(threading.enumerate())
    sinks = Sinks(kit.make_config(report_to=["tensorboard"]), tmp_path, None)
    shutil.rmtree(tmp_path / "tensorboard")
    for record in RECORDS:
        sinks.write(record)
    sinks.close()
    for thread in set(threading.enumerate()) - others:
        thread.join(10)  # tensorboard's own dies of it, too
    assert caplog.text.count("trainer.report_to: tensorboard failed, it gets nothing more: FileNotFoundError") == 1
