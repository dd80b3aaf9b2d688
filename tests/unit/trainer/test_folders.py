"""A folder written aside is whole or absent."""

import pytest

from sparring.backend.folders import written_aside


def test_a_folder_takes_its_place_once_it_is_whole(tmp_path):
    final = tmp_path / "model"
    for text in ("one", "two"):
        with written_aside(final) as partial:
            (partial / "deep").mkdir()
            (partial / "deep" / "file").write_text(text)
            assert not final.exists() or (final / "deep" / "file").read_text() == "one"
        assert (final / "deep" / "file").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_stood_there_stands_when_the_writing_fails(tmp_path, error):
    final = tmp_path / "model"
    final.mkdir()
    (final / "file").write_text("old")

    def fail() -> None:
        with written_aside(final) as partial:
            (partial / "file").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "file"]
    assert (final / "file").read_text() == "old"


def test_what_a_killed_writer_left_is_no_matter(tmp_path):
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "stale").write_text("")
    with written_aside(tmp_path / "model") as partial:
        (partial / "file").write_text("")
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["file"]
