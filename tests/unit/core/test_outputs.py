"""What a command writes does not silently take the place of what stands there."""

import os

import pytest

from sparring.cli import main
from sparring.errors import ConfigError
from sparring.eval_log import EvalLog
from sparring.evaluation import EvalEpisode
from sparring.outputs import check_new_file, check_new_folder, writing

EPISODE = EvalEpisode("e", "test/0", 1.0, solved=True, turns=1, messages=())


def test_a_model_is_replaced_when_told_to_and_nothing_else_is(tmp_path):
    check_new_folder(tmp_path / "new", overwrite=False)
    model, empty, other, file = (tmp_path / name for name in ("model", "empty", "other", "file"))
    for folder in (model, empty, other):
        folder.mkdir()
    (model / "config.json").touch()
    (other / "letters.txt").touch()
    file.touch()
    for path in (model, empty, other, file):
        with pytest.raises(ConfigError, match="exists already; choose another folder, or add --overwrite"):
            check_new_folder(path, overwrite=False)
    check_new_folder(model, overwrite=True)
    check_new_folder(empty, overwrite=True)
    for path, why in ((other, "holds no model"), (file, "is no folder")):
        with pytest.raises(ConfigError, match=f"{why}.*so --overwrite does not replace it"):
            check_new_folder(path, overwrite=True)


def test_a_link_is_not_followed_by_an_overwrite(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "link").symlink_to("model")
    with pytest.raises(ConfigError, match="is no folder"):
        check_new_folder(tmp_path / "link", overwrite=True)


def test_pipes_and_devices_are_written_to_as_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_new_file(tmp_path / "pipe", overwrite=False)
    check_new_file(tmp_path / "new", overwrite=False)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists already; choose another file, or add --overwrite"):
        check_new_file(tmp_path / "file", overwrite=False)
    check_new_file(tmp_path / "file", overwrite=True)


def test_what_cannot_be_written_is_named_with_its_reason(tmp_path):
    def write(folder):
        with writing(folder):
            folder.write_text("x")

    with pytest.raises(ConfigError, match=r"--out: cannot write /.*: Is a directory"):
        write(tmp_path)


def test_an_evaluations_file_is_taken_up_again_or_begun_anew(tmp_path):
    path = tmp_path / "deep" / "eval.jsonl"
    log = EvalLog(path, {"model": "a"})
    log.add(EPISODE)
    log.close()
    taken_up = EvalLog(path, {"model": "a"})
    assert list(taken_up.episodes) == [("", "test/0", 0)]
    with pytest.raises(ConfigError, match="another evaluation is writing"):
        EvalLog(path, {"model": "b"}, overwrite=True)
    taken_up.close()
    with pytest.raises(ConfigError, match="model='a', not 'b'; choose another file, or add --overwrite"):
        EvalLog(path, {"model": "b"})
    anew = EvalLog(path, {"model": "b"}, overwrite=True)
    assert anew.episodes == {}
    anew.close()
    assert path.read_text() == '{"evaluation": {"model": "b"}}\n'


@pytest.mark.parametrize("content", [b'{"text": "no newline"}', b'{"text": "mine"}\n', b"\xff\xfe"])
def test_a_file_that_is_no_evaluation_stays_as_it_is(tmp_path, content):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"holds something else than an evaluation.*or add --overwrite"):
        EvalLog(path, {"model": "a"})
    assert path.read_bytes() == content


def test_a_first_line_that_a_kill_cut_off_is_written_again(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text('{"evalu')
    EvalLog(path, {"model": "a"}).close()
    assert path.read_text() == '{"evaluation": {"model": "a"}}\n'


def test_an_import_refuses_a_folder_that_is_there_before_it_reads_anything(tmp_path, capsys):
    assert main(["import", "gguf", str(tmp_path / "absent.gguf"), str(tmp_path)]) == 2
    assert f"OUT: {tmp_path} exists already; choose another folder, or add --overwrite" in capsys.readouterr().err
