"""Archives out of a sandbox are hostile: nothing is written outside the folder, and a refusal leaves nothing."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.sandbox import SandboxRequestError
from sparring.sandbox.archive import pack_tree, unpack_tree

LIMIT = 1 << 20


def archive(*members: tuple[str, str, str]) -> bytes:
    """Members as (kind, name, content or target)."""
    kinds = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}
    kinds |= {"fifo": tarfile.FIFOTYPE, "device": tarfile.CHRTYPE}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for kind, name, content in members:
            info = tarfile.TarInfo(name)
            info.type = kinds[kind]
            info.mode = 0o4755
            if kind in ("sym", "hard"):
                info.linkname = content
            data = content.encode() if kind == "file" else b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


HOSTILE = {
    "absolute": archive(("file", "/etc/x", "x")),
    "parent": archive(("file", "a/../../x", "x")),
    "link out, then through it": archive(("sym", "out", ".."), ("file", "out/x", "x")),
    "absolute link": archive(("sym", "out", "/etc/passwd")),
    "link to the root's parent by another link": archive(("dir", "d", ""), ("sym", "a", "d"), ("sym", "b", "a/../..")),
    "link through a link": archive(("sym", "s", "."), ("sym", "t", "s/x")),
    "file under a link": archive(("dir", "d", ""), ("sym", "s", "d"), ("file", "s/x", "x")),
    "link over a file": archive(("file", "f", "x"), ("sym", "f", "g")),
    "hard link out": archive(("hard", "h", "/etc/passwd")),
    "hard link to nothing": archive(("hard", "h", "nothing")),
    "pipe": archive(("fifo", "p", "")),
    "device": archive(("device", "d", "")),
    "too large": archive(("file", "f", "x" * (LIMIT + 1))),
    "file where a folder is": archive(("dir", "d", ""), ("file", "d", "x")),
    "no archive": b"not an archive" * 100,
    "cut off": archive(("file", "f", "x" * 5000))[:2000],
}


@pytest.mark.parametrize("packed", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_archive_is_refused_and_leaves_nothing(packed: bytes, tmp_path: Path) -> None:
    with pytest.raises(SandboxRequestError):
        unpack_tree(packed, tmp_path / "to", LIMIT)
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_and_what_is_not(tmp_path: Path) -> None:
    packed = archive(
        ("file", "./lib.so.1.2", "elf"),
        ("sym", "./lib.so.1", "lib.so.1.2"),
        ("sym", "lib.so", "lib.so.1"),
        ("dir", "sub", ""),
        ("sym", "sub/up", "../lib.so.1.2"),
        ("hard", "same", "./lib.so.1.2"),
        ("sym", "dangling", "not/there"),
    )
    unpack_tree(packed, tmp_path / "to", LIMIT)
    to = tmp_path / "to"
    assert (to / "lib.so").read_text() == "elf", "a chain of links to a file is fine"
    assert (to / "sub" / "up").read_text() == "elf"
    assert (to / "same").read_text() == "elf"
    assert (to / "dangling").is_symlink()
    assert (to / "lib.so.1.2").stat().st_mode & 0o7777 == 0o755, "no set-user-id"
    with pytest.raises(SandboxRequestError, match="not empty"):
        unpack_tree(packed, to, LIMIT)


def test_sizes_add_up_over_hard_links(tmp_path: Path) -> None:
    many = [("hard", f"h{i}", "f") for i in range(100)]
    with pytest.raises(SandboxRequestError):
        unpack_tree(archive(("file", "f", "x" * 50_000), *many), tmp_path / "to", LIMIT)


names = st.text(st.sampled_from("ab./ \\\n'ü"), min_size=1, max_size=8)
member = st.one_of(
    st.tuples(st.just("file"), names, st.text("xy", max_size=5)),
    st.tuples(st.just("dir"), names, st.just("")),
    st.tuples(st.sampled_from(["sym", "hard"]), names, names),
)


@settings(deadline=None, max_examples=80)
@given(st.lists(member, max_size=6))
def test_nothing_in_an_unpacked_folder_leads_out_of_it(tmp_path_factory: pytest.TempPathFactory, members: list) -> None:
    to = tmp_path_factory.mktemp("law") / "to"
    try:
        unpack_tree(archive(*members), to, LIMIT)
    except SandboxRequestError:
        assert not to.exists()
        return
    inside = to.resolve()
    for path in to.rglob("*"):
        try:
            assert path.resolve().is_relative_to(inside)
        except (RuntimeError, OSError):  # links in a circle lead nowhere
            continue
    assert [entry.name for entry in to.parent.iterdir()] == ["to"]


def _with_outward_link(tree: Path) -> None:
    (tree / "l").symlink_to("../../x")


def _with_pipe(tree: Path) -> None:
    os.mkfifo(tree / "p")


def _too_large(tree: Path) -> None:
    (tree / "f").write_bytes(b"x" * (LIMIT + 1))


@pytest.mark.parametrize("spoil", [_with_outward_link, _with_pipe, _too_large])
def test_what_must_not_go_in_is_refused(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(SandboxRequestError):
        pack_tree(tmp_path, LIMIT)


def test_a_tree_goes_there_and_back(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "empty").mkdir(parents=True)
    (tree / "a" / "f").write_bytes(bytes(range(256)))
    (tree / "run").write_text("x")
    (tree / "run").chmod(0o755)
    (tree / "link").symlink_to("a/f")
    unpack_tree(pack_tree(tree, LIMIT), tmp_path / "back", LIMIT)
    found = {path.relative_to(tmp_path / "back").as_posix() for path in (tmp_path / "back").rglob("*")}
    assert found == {"a", "a/empty", "a/f", "run", "link"}
    assert (tmp_path / "back" / "link").read_bytes() == bytes(range(256))
    assert (tmp_path / "back" / "run").stat().st_mode & 0o111


@pytest.mark.timeout(20)
def test_a_size_below_zero_does_not_go_round_for_ever(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    packed = bytearray(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 2048)
    packed[124:136] = b"\xff" * 10 + (-1024 & 0xFFFF).to_bytes(2, "big")  # base 256, as GNU writes what is large
    packed[148:156] = b"%06o\0 " % (sum(packed[:148]) + 8 * 32 + sum(packed[156:512]))
    with pytest.raises(SandboxRequestError):
        unpack_tree(bytes(packed), tmp_path / "out", 1 << 20)
    assert list(tmp_path.iterdir()) == []
