"""Specs, owners, labels, the system call filter, the framing of Docker's streams, the text that a model sees."""

import asyncio
import os
import struct
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.errors import ConfigError
from sparring.sandbox import ExecResult, LocalProvider, SandboxRequestError, SandboxSpec, open_provider
from sparring.sandbox.docker import container_options
from sparring.sandbox.docker_exec import DockerProcess
from sparring.sandbox.live import _Call
from sparring.sandbox.owner import Owner
from sparring.sandbox.reaper import is_left_over, labels
from sparring.sandbox.seccomp import seccomp_program
from sparring.sandbox.session import _quoted
from sparring.sandbox.tools import EditorTool, render_result

quiet = pytest.mark.filterwarnings("ignore:LocalSandbox isolates nothing")


@pytest.mark.parametrize(
    "bad",
    [
        {"memory_mib": 0},
        {"cpus": -1},
        {"pids": 0},
        {"disk_mib": 0},
        {"workdir": "work"},
        {"workdir": "/"},
        {"workdir": "/a/../b"},
        {"workdir": "/proc/x"},
        {"network": ("example.org",)},
        {"network": ("http://example.org:80",)},
        {"env": {"A B": "x"}},
        {"env": {"A": "\0"}},
    ],
)
def test_a_bad_spec_says_so_before_anything_starts(bad: dict) -> None:
    with pytest.raises(ConfigError):
        SandboxSpec(**bad)


def test_equal_specs_share_a_pool() -> None:
    assert SandboxSpec(env={"A": "1"}) == SandboxSpec(env={"A": "1"})
    assert len({SandboxSpec(env={"A": "1"}), SandboxSpec(env={"A": "1"}), SandboxSpec(env={"A": "2"})}) == 2


def test_the_hardening_of_a_container() -> None:
    options = container_options(SandboxSpec(memory_mib=100, disk_mib=40, pids=7, cpus=0.5))
    assert options["network_mode"] == "none"
    assert options["read_only"] is True
    assert options["cap_drop"] == ["ALL"]
    assert options["security_opt"] == ["no-new-privileges"]
    assert options["pids_limit"] == 7
    assert options["mem_limit"] == options["memswap_limit"] == (100 + 40 + 16) << 20
    assert options["nano_cpus"] == 500_000_000
    assert "size=40m" in options["tmpfs"]["/work"]


def test_an_owner_lives_until_its_process_ends() -> None:
    assert not Owner.current().is_dead()
    assert Owner.parse(str(Owner.current())) == Owner.current()
    code = "from sparring.sandbox.owner import Owner; print(Owner.current())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    owner = Owner.parse(ended.stdout.strip())
    assert owner is not None
    assert owner.is_dead()
    current = Owner.current()
    assert Owner(current.place, current.pid, current.start_ticks + 1).is_dead(), "the same id, but a later process"
    assert not Owner("another-machine", 1, 1).is_dead(), "of others nothing is known"
    assert Owner.parse("nonsense") is None


def test_what_the_reaper_may_take() -> None:
    live = labels(Owner.current(), 60)
    assert not is_left_over(live)
    assert is_left_over(labels(Owner.current(), -60)), "its deadline is past"
    dead = Owner(Owner.current().place, os.getpid(), 1)
    assert is_left_over(labels(dead, 60))
    assert not is_left_over(labels(Owner("another-machine", 1, 1), 60))
    assert not is_left_over({}), "what is not ours"
    assert int(live["sparring.deadline"]) > time.time()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_lands_on_an_instruction(machine: str) -> None:
    program = seccomp_program(machine)
    assert program is not None
    code = list(struct.iter_unpack("=HBBI", program))
    assert len(program) < 65536, "it is handed over through a pipe"
    for at, (kind, if_true, if_false, _) in enumerate(code):
        if kind & 0x07 == 0x05:
            assert at + 1 + max(if_true, if_false) < len(code)
    assert code[-1][0] == 0x06
    assert seccomp_program("vax") is None


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=8), st.lists(st.integers(1, 30)))
def test_dockers_frames_are_told_apart_however_they_are_cut(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    async def parse() -> dict[int, bytes]:
        got = {1: b"", 2: b""}

        def on_output(stream: int, data: bytes) -> None:
            got[stream] += data

        process = DockerProcess(None, "id", on_output, lambda: None)  # type: ignore[arg-type]
        rest = b"".join(struct.pack(">BxxxI", stream, len(data)) + data for stream, data in frames)
        for cut in cuts:
            process.data_received(rest[:cut])
            rest = rest[cut:]
        process.data_received(rest)
        return got

    expected = {name: b"".join(data for stream, data in frames if stream == name) for name in (1, 2)}
    assert asyncio.run(parse()) == expected


@pytest.mark.parametrize("forged", [b" 0 ", b"", b" 9999 x\n", b" 0"])
def test_what_follows_a_forged_end_mark_is_not_kept_and_the_true_one_is_found(forged: bytes) -> None:
    call = _Call(1000)
    mark = b"\x1e" + call.new_mark().encode()
    call.feed(1, b"begin " + mark + forged)
    for _ in range(100):
        call.feed(1, b"x" * 65_536)
        assert len(call._pending[1]) < 2 * 65_536
    call.feed(1, b"end" + mark + b" 3 /work\n")
    call.feed(2, mark + b" 3 /work\n")
    assert call.done.is_set()
    assert (call.exit_code, call.word) == (3, "/work")
    assert call.outputs[1].total > 6_000_000
    assert call.text(1).startswith("begin ")
    assert call.text(1).endswith("xend")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60))
def test_any_text_is_one_line_of_bash_that_means_it(text: str) -> None:
    line = _quoted(text)
    assert "\n" not in line
    assert "\x1e" not in line


def test_quoted_text_means_itself_in_bash() -> None:
    text = "it's $HOME \\ \\n `x` \"q\" !!\n\r\ttwo\x1e\x01 ü €"
    run = subprocess.run(["bash", "-c", f"printf %s {_quoted(text)}"], capture_output=True, check=True, timeout=10)
    assert run.stdout.decode() == text


def test_results_as_text_for_a_model() -> None:
    assert render_result(ExecResult(0, "out\n", "", 0.1), timeout_s=5) == "out"
    assert render_result(ExecResult(0, "", "", 0.1), timeout_s=5) == "[no output]"
    assert render_result(ExecResult(2, "out\n", "err\n", 0.1), timeout_s=5) == "out\nerr\n[exit code 2]"
    assert "timed out after 5 s" in render_result(ExecResult(124, "", "", 5, timed_out=True), timeout_s=5)
    assert "out of memory" in render_result(ExecResult(137, "", "", 1, oom_killed=True), timeout_s=5)
    assert "left out" in render_result(ExecResult(0, "x" * 50_000, "", 1), timeout_s=5)


@quiet
async def test_the_editor_says_what_is_wrong() -> None:
    async with LocalProvider() as provider, await provider.take() as sandbox:
        editor = EditorTool(sandbox)
        await sandbox.write("crlf.txt", "one\r\ntwo\r\nthree")
        await sandbox.write("run.sh", "#!/bin/sh\necho a\necho a\n", mode=0o755)
        assert "occurs 2 times in run.sh, at lines 2, 3" in await editor.replace_in_file("run.sh", "echo a", "echo b")
        assert "differs in white space only" in await editor.replace_in_file("run.sh", "  echo a", "x")
        assert "nearest line is 2" in await editor.replace_in_file("run.sh", "echo b", "x")
        assert "empty" in await editor.replace_in_file("run.sh", "", "x")
        assert "lines 1 to 3" in await editor.view_file("run.sh", 9)
        assert "after_line must be from 0 to 3" in await editor.insert_in_file("run.sh", 4, "x")
        assert "no such file" in await editor.view_file("not-there")
        assert "is outside" in await editor.create_file("../x", "x")
        await editor.replace_in_file("crlf.txt", "one\ntwo", "1\n2")
        await editor.insert_in_file("crlf.txt", 3, "four")
        assert await sandbox.read("crlf.txt") == b"1\r\n2\r\nthree\r\nfour\r\n"
        await editor.insert_in_file("run.sh", 1, "set -e")
        assert (await sandbox.exec("./run.sh")).ok, "an edited script can still be run"
        await sandbox.write("bin", b"\xff\xfe")
        assert "not a text file" in await editor.view_file("bin")


@quiet
async def test_the_editor_counts_newlines_as_lines_and_nothing_else() -> None:
    strange = "one\x0c\x0b\x1c\x85\u2028\rstill one\ntwo\n\nfour"
    async with LocalProvider() as provider, await provider.take() as sandbox:
        editor = EditorTool(sandbox)
        assert await editor.create_file("f", strange) == "[wrote f: 4 lines]"
        shown = await editor.view_file("f")
        assert [line.split("\t")[0].strip() for line in shown.split("\n")] == ["1", "2", "3", "4"]
        assert await editor.view_file("f", 2, 2) == "     2\ttwo"
        await editor.insert_in_file("f", 1, "new\x0cline")
        assert (await sandbox.read("f")).decode() == strange.replace("two", "new\x0cline\ntwo")
        assert "     3\t2" in await editor.replace_in_file("f", "two", "2")
        assert "line 3 differs" in (await editor.replace_in_file("f", "  2", "x")).lower()


@quiet
async def test_paths_stay_in_the_work_folder() -> None:
    async with LocalProvider() as provider, await provider.take() as sandbox:
        assert sandbox.resolve("a/./b/../c") == f"{sandbox.workdir}/a/c"
        for path in ("..", "a/../..", "/etc", "/", "a\0", "\ud800", "x" * 5000, "/../../.."):
            with pytest.raises(SandboxRequestError):
                sandbox.resolve(path)


async def test_the_local_sandbox_says_loudly_that_it_isolates_nothing() -> None:
    async with await open_provider("local") as provider:
        with pytest.warns(UserWarning, match="isolates nothing"):
            await provider.take()


async def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, docker, bubblewrap, local"):
        await open_provider("podman")  # type: ignore[arg-type]
