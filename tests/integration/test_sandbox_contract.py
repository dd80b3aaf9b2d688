"""What every sandbox does, whatever is behind it."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sparring.errors import SandboxError
from sparring.sandbox import Sandbox, SandboxRequestError, SandboxSpec, open_provider
from sparring.sandbox.docker import DockerProvider
from sparring.sandbox.tools import BashTool, EditorTool, PythonTool

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:LocalSandbox isolates nothing")]
KINDS = [
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    "local",
]
SPEC = SandboxSpec(memory_mib=192, disk_mib=64, pids=64, env={"FROM_SPEC": "spec"}, max_transfer_mib=8)


@pytest_asyncio.fixture(params=KINDS)
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with await open_provider(request.param) as provider, await provider.take(SPEC) as sandbox:
        yield sandbox


async def test_commands(box: Sandbox) -> None:
    """One sandbox for all of it: a container takes longer to start than all of these to run."""
    done = await box.exec(["printf", "%s", "$HOME 'quoted' \n;"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, "$HOME 'quoted' \n;", "")
    done = await box.exec("echo out; echo err >&2; exit 7")
    assert (done.exit_code, done.stdout, done.stderr, done.ok) == (7, "out\n", "err\n", False)
    assert (await box.exec(["cat"], stdin=b"\0\xff" * 200_000)).truncated is False
    assert (await box.exec("wc -c", stdin=b"x" * 3_000_000)).stdout.strip() == "3000000"
    assert (await box.exec("cat")).stdout == "", "without stdin there is an empty one"
    assert (await box.exec("echo $FROM_SPEC $MINE", env={"MINE": "a 'b' $c"})).stdout == "spec a 'b' $c\n"
    assert (await box.exec("mkdir -p sub && pwd")).stdout == f"{box.workdir}\n"
    assert (await box.exec("pwd", cwd="sub")).stdout == f"{box.workdir}/sub\n"
    assert (await box.exec(["no-such-program"])).exit_code == 127
    assert (await box.exec("true", cwd="not-there")).exit_code != 0
    started = time.monotonic()
    late = await box.exec("echo early; sleep 30", timeout_s=0.5)
    assert late.timed_out
    assert late.stdout == "early\n"
    assert time.monotonic() - started < 2.5
    both = await asyncio.gather(box.exec("sleep 0.3; echo a"), box.exec("sleep 0.3; echo b"))
    assert [one.stdout for one in both] == ["a\n", "b\n"]


async def test_bad_requests_are_told_apart_from_a_broken_sandbox(box: Sandbox) -> None:
    for call in (
        box.exec(["echo", "a\0b"]),
        box.exec(["echo", "\ud800"]),
        box.exec([]),
        box.exec("true", env={"BAD NAME": "x"}),
        box.exec("true", env={"X": "\0"}),
        box.read("not-there"),
        box.read("."),
        box.read("../../etc/hostname"),
        box.read("/etc/hostname"),
        box.read("a/../../../etc/hostname"),
        box.write("../outside", "x"),
        box.write("/etc/outside", "x"),
        box.write("a\0b", "x"),
        box.write("big", b"x" * (9 << 20)),
    ):
        with pytest.raises(SandboxRequestError):
            await call
    assert (await box.exec("head -c 9000000 /dev/zero > big")).ok
    with pytest.raises(SandboxRequestError, match="max_transfer_mib"):
        await box.read("big")
    with pytest.raises(SandboxRequestError, match="max_transfer_mib"):
        await box.snapshot()


async def test_files_and_trees(box: Sandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    await box.write("deep/er/file.bin", data)
    assert await box.read("deep/er/file.bin") == data
    await box.write("run.sh", "#!/bin/sh\necho ran\n", mode=0o755)
    assert (await box.exec(["./run.sh"])).stdout == "ran\n"
    tree = tmp_path / "tree"
    (tree / "sub dir").mkdir(parents=True)
    (tree / "sub dir" / "näme '\n").write_text("odd name")
    (tree / "link").symlink_to("sub dir")
    (tree / "tool").write_text("#!/bin/sh\necho tool\n")
    (tree / "tool").chmod(0o755)
    await box.upload(tree, "up")
    assert (await box.exec(["cat", "up/link/näme '\n"])).stdout == "odd name"
    assert (await box.exec(["up/tool"])).stdout == "tool\n"
    await box.download("up", tmp_path / "back")
    assert (tmp_path / "back" / "sub dir" / "näme '\n").read_text() == "odd name"
    assert (tmp_path / "back" / "link").readlink() == Path("sub dir")
    assert (tmp_path / "back" / "tool").stat().st_mode & 0o111
    await box.download("run.sh", tmp_path / "run.sh")
    assert (tmp_path / "run.sh").read_text().endswith("ran\n")


async def test_what_comes_out_cannot_write_elsewhere_on_the_host(box: Sandbox, tmp_path: Path) -> None:
    """The sandbox's own `tar` may have been replaced; here it is its content that is hostile."""
    for make in (
        "ln -s /etc out/etc",
        "ln -s ../../../.. out/up",
        "ln -s sub out/a && ln -s a/../.. out/b",
        "mkfifo out/pipe",
    ):
        await box.exec(f"rm -rf out; mkdir -p out/sub; {make}")
        with pytest.raises(SandboxRequestError):
            await box.download("out", tmp_path / "out")
        assert os.listdir(tmp_path) == [], make
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "leads-out").symlink_to("/etc/passwd")
    with pytest.raises(SandboxRequestError, match="leads out"):
        await box.upload(outside)


async def test_snapshot_and_restore(box: Sandbox) -> None:
    await box.exec("mkdir -p a/b; echo one > a/b/f; ln -s b a/l; chmod 700 a/b/f; echo hidden > .h")
    before = (await box.exec("find . -printf '%p %y %m %l\\n' | sort; cat a/b/f")).stdout
    snapshot = await box.snapshot()
    await box.exec("rm -rf a .h; echo new > c; mkdir d")
    await box.restore(snapshot)
    assert (await box.exec("find . -printf '%p %y %m %l\\n' | sort; cat a/b/f")).stdout == before
    with pytest.raises(SandboxRequestError, match="image"):
        await box.restore(type(snapshot)("another", snapshot.work_tar))


async def test_a_session_keeps_its_state(box: Sandbox) -> None:
    session = await box.session()
    await session.exec("mkdir -p here; cd here; export A=1; b=2; f() { echo f$1; }; sleep 60 & echo started")
    assert (await session.exec("pwd; echo $A $b; f 3; jobs | wc -l")).stdout == f"{box.workdir}/here\n1 2\nf3\n1\n"
    await session.exec("false")
    assert (await session.exec("echo $?")).stdout == "1\n"
    hung = await session.exec("echo before; sleep 60", timeout_s=0.3)
    assert (hung.timed_out, hung.stdout) == (True, "before\n")
    assert (await session.exec("echo $A $b; f 3; jobs | wc -l")).stdout == "1 2\nf3\n1\n", "the job lives on"
    assert (await session.exec("exit 5")).exit_code == 5
    assert (await session.exec("pwd; echo $A")).stdout == f"{box.workdir}/here\n1\n", "a new shell, same place"
    odd = await session.exec("printf 'no newline'; printf '%s' \"it's\" >&2; echo $'\\x1e'")
    assert (odd.stdout, odd.stderr) == ("no newline\x1e\n", "it's")
    assert (await session.exec("cat <<'EOF'\nline 'one' \\n\n$two\nEOF")).stdout == "line 'one' \\n\n$two\n"
    assert (await session.exec("echo 'unfinished")).exit_code != 0
    assert (await session.exec("head -c 3000000 /dev/zero | tr '\\0' z")).truncated
    await session.close()
    with pytest.raises(SandboxError, match="closed"):
        await session.exec("true")


async def test_tools(box: Sandbox) -> None:
    python, bash, editor = PythonTool(box, timeout_s=2), BashTool(box, timeout_s=1), EditorTool(box)
    assert await python.python("x = [1]\nx + [2]") == "[1, 2]"
    assert (await python.python("1 / 0")).endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert "timed out after 2 s" in await python.python("while True: pass")
    assert await python.python("x") == "[1]", "variables survive errors and interrupts"
    assert "new one" in await python.python("import os; os._exit(0)") + await python.python("1")
    assert await bash.bash("cd /tmp; echo hi; false") == "hi\n[exit code 1]"
    assert await bash.bash("pwd") == "/tmp"
    assert "timed out" in await bash.bash("sleep 9")
    await editor.create_file("pkg/m.py", "a = 1\nb = 2\n")
    assert "b = 3" in await editor.replace_in_file("pkg/m.py", "b = 2", "b = 3")
    assert await box.read("pkg/m.py") == b"a = 1\nb = 3\n"
    assert await editor.view_file("pkg") == "m.py"
    await python.close()
    await bash.close()


async def test_a_sandbox_is_used_once_and_stops_twice(box: Sandbox) -> None:
    with pytest.raises(SandboxError, match="used once"):
        await box.start()
    await box.stop()
    await box.stop()
    assert not await box.alive()
    with pytest.raises(SandboxError, match="not running"):
        await box.exec("true")


@pytest.mark.docker
async def test_a_daemon_over_tcp() -> None:
    """As a remote one is reached; here a forwarder stands before the local socket."""
    local = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not local.startswith("unix://"):
        pytest.skip("the daemon is a remote one already, and all other tests ran on it")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(local.removeprefix("unix://"))
        with contextlib.suppress(OSError):
            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))
        writer.close()
        up_writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with DockerProvider(f"tcp://127.0.0.1:{port}") as provider, await provider.take(SPEC) as sandbox:
            assert (await sandbox.exec("wc -c", stdin=b"x" * 1_000_000)).stdout.strip() == "1000000"
            session = await sandbox.session()
            assert (await session.exec("echo over tcp")).stdout == "over tcp\n"


async def test_a_caller_that_is_cancelled_leaves_a_working_sandbox(box: Sandbox) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(box.exec("sleep 60", timeout_s=60), 0.5)
    assert (await box.exec("echo alive", timeout_s=10)).stdout == "alive\n"
