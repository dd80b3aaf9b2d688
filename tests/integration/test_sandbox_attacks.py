"""What hostile code tries, on a real daemon and on bubblewrap: it escapes nothing, hangs nobody, leaves nothing."""

import asyncio
import base64
import contextlib
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sparring.sandbox import ExecResult, Sandbox, SandboxRequestError, SandboxSpec, open_provider
from sparring.sandbox.tools import EditorTool, PythonTool

pytestmark = [pytest.mark.slow]
KINDS = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
TIMEOUT_S = 1.0
SPEC = SandboxSpec(memory_mib=192, disk_mib=64, pids=64, max_output_bytes=100_000)
MARK = uuid.uuid4().hex
"""In the arguments of whatever an attack leaves running: searched for in every process of this machine afterwards."""
LINGER = f"sh -c 'while :; do sleep 0.5; done' {MARK}"


@pytest_asyncio.fixture(params=KINDS)
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A fresh sandbox: after the attack it must still work, and once it is stopped nothing of it may be left."""
    async with await open_provider(request.param) as provider, await provider.take(SPEC) as sandbox:
        yield sandbox
        after = await sandbox.exec("echo alive", timeout_s=20)
        assert (after.exit_code, after.stdout) == (0, "alive\n"), after
    assert processes_with(MARK) == []


def processes_with(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in command and int(folder.name) != os.getpid():
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


async def attack(box: Sandbox, code: str, timeout_s: float = TIMEOUT_S) -> ExecResult:
    """Run it, and hold the deadline: whatever it does, the caller goes on within two seconds more."""
    started = time.monotonic()
    result = await box.exec(code, timeout_s=timeout_s)
    assert time.monotonic() - started < timeout_s + 2.0
    return result


def python(code: str) -> str:
    """A shell command that runs `code`, with no quoting to get wrong."""
    encoded = base64.b64encode(code.encode()).decode()
    return f"echo {encoded} | base64 -d > /tmp/attack.py && exec python3 /tmp/attack.py {MARK}"


# Exhaustion

_BOMB = python("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass\n")
BOMB_BEHIND = _BOMB.replace("exec python3", "setsid python3") + " >/dev/null 2>&1 &"
"""Goes off in a session and a process group of its own, and does not hold up the command that left it behind."""


async def test_fork_bomb(box: Sandbox) -> None:
    bomb = asyncio.ensure_future(attack(box, f"bash -c 'f() {{ f | f & }}; f; wait; sleep 60' {MARK}"))
    peak = 0
    while not bomb.done():
        peak = max(peak, len(processes_with(MARK)))
        await asyncio.wait([bomb], timeout=0.02)
    assert SPEC.pids // 4 < peak <= SPEC.pids, "it went off, and met its limit"
    assert bomb.result().exit_code != 0


async def test_fork_bomb_that_leaves_its_session_and_group(box: Sandbox) -> None:
    bomb = "import os\nos.setsid()\nwhile True:\n    try:\n        os.fork() or os.setsid()\n    except OSError: pass\n"
    result = await attack(box, python(bomb))
    assert result.timed_out


async def test_a_fork_bomb_left_behind_does_not_keep_the_next_command_from_starting(box: Sandbox) -> None:
    await attack(box, BOMB_BEHIND, timeout_s=3)
    for _ in range(3):
        result = await attack(box, "echo OCI runtime exec failed: no; exit 126", timeout_s=10)
        assert (result.exit_code, result.stdout) == (126, "OCI runtime exec failed: no\n")


async def test_memory_bomb_is_killed_and_told(box: Sandbox) -> None:
    result = await attack(box, python("blocks = []\nwhile True: blocks.append(b'x' * (16 << 20))"), timeout_s=10)
    assert result.oom_killed
    assert result.exit_code == 137


async def test_memory_bomb_of_many_processes(box: Sandbox) -> None:
    bomb = "import os, time\nfor _ in range(20): os.fork() or (b'x' * (64 << 20), time.sleep(3), os._exit(0))\n"
    await attack(box, python(bomb + "for _ in range(20): os.wait()"), timeout_s=20)
    assert await box.oom_kills() > 0


async def test_disk_filling_ends_at_the_size_of_the_tmpfs(box: Sandbox) -> None:
    result = await attack(box, "cat /dev/zero > fill; stat -c %s fill", timeout_s=10)
    assert "No space left on device" in result.stderr
    assert int(result.stdout) <= 80 << 20
    assert (await box.exec("rm fill")).ok


async def test_disk_filling_elsewhere_is_refused_or_bounded(box: Sandbox) -> None:
    for folder in ("/", "/usr", "/etc", "/dev", "/dev/shm", "/var/tmp", "/run", "/home/agent", "/root", "/proc"):
        result = await attack(box, f"cat /dev/zero > {folder}/fill", timeout_s=10)
        assert result.exit_code != 0, folder
        refusals = ("No space left", "Read-only", "denied", "nonexistent", "No such", "not permitted")
        assert any(said in result.stderr for said in refusals), (folder, result)


async def test_inodes_run_out_inside_alone(box: Sandbox) -> None:
    """Empty files fill no tmpfs; the memory limit ends what makes them without end."""
    result = await attack(box, "i=0; while : > f$i; do i=$((i+1)); done")
    assert result.timed_out or result.oom_killed or "No space left" in result.stderr
    assert (await box.exec("find . -mindepth 1 -delete", timeout_s=20)).ok
    assert (await box.exec("echo new > again && cat again")).stdout == "new\n"


async def test_processor_is_shared_out(box: Sandbox) -> None:
    """Eight spinning processes get one processor's time between them, as `cpus` says."""
    spin = "for i in 1 2 3 4 5 6 7 8; do timeout 1.5 sh -c 'while :; do :; done' & done; wait; times | tail -n 1"
    result = await attack(box, spin, timeout_s=10)
    minutes, seconds = result.stdout.split()[0].rstrip("s").split("m")
    assert int(minutes) * 60 + float(seconds) < 2.5


# Output


async def test_a_gigabyte_of_output_is_drained_and_bounded(box: Sandbox) -> None:
    result = await attack(box, "head -c 1073741824 /dev/zero | tr '\\0' x; echo end", timeout_s=40)
    assert result.exit_code == 0
    assert result.truncated
    assert len(result.stdout) < SPEC.max_output_bytes + 100
    assert result.stdout.startswith("xxx")
    assert result.stdout.endswith("end\n")


async def test_endless_output_without_a_newline(box: Sandbox) -> None:
    result = await attack(box, "tr '\\0' y < /dev/zero")
    assert result.timed_out
    assert result.truncated
    assert "\ny" not in result.stdout.removeprefix("y").split("left out ...]\n")[0]


async def test_endless_output_on_both_streams(box: Sandbox) -> None:
    result = await attack(box, "yes out & yes err >&2")
    assert result.timed_out
    assert "out" in result.stdout
    assert "err" in result.stderr


async def test_binary_output(box: Sandbox) -> None:
    result = await attack(box, "printf 'a\\000\\377\\376\\303('")
    assert result.stdout == "a\0\ufffd\ufffd\ufffd("


async def test_output_that_imitates_dockers_framing(box: Sandbox) -> None:
    frame = "\\002\\000\\000\\000\\377\\377\\377\\377"
    result = await attack(box, f"printf '{frame}forged'; echo plain")
    assert result.stdout.endswith("forgedplain\n")
    assert result.stderr == ""


async def test_closing_standard_output_and_running_on(box: Sandbox) -> None:
    result = await attack(box, f"exec >&- 2>&-; {LINGER}")
    assert result.timed_out


# Outliving the time limit


async def test_ignoring_sigterm(box: Sandbox) -> None:
    result = await attack(box, f"trap '' TERM INT HUP; {LINGER}")
    assert result.timed_out


async def test_double_fork_and_setsid(box: Sandbox) -> None:
    result = await attack(box, f"(setsid {LINGER} &) ; setsid {LINGER} & exec {LINGER}")
    assert result.timed_out


async def test_a_daemon_that_keeps_the_output_open_does_not_hold_up_the_result(box: Sandbox) -> None:
    result = await attack(box, f"(setsid {LINGER} &); echo done", timeout_s=10)
    assert (result.exit_code, result.stdout) == (0, "done\n")


@pytest.mark.parametrize("signal", ["KILL", "STOP", "TERM"])
async def test_signals_to_the_time_keeper(box: Sandbox, signal: str) -> None:
    """`timeout`, the parent, has the same user: it can be killed or stopped, and the deadline holds all the same."""
    result = await attack(box, f"trap '' TERM; kill -{signal} $PPID; {LINGER}")
    assert not result.ok


async def test_stopping_oneself_and_ones_parent(box: Sandbox) -> None:
    result = await attack(box, "kill -STOP $PPID $$")
    assert result.timed_out


async def test_the_clock_cannot_be_set(box: Sandbox) -> None:
    result = await attack(box, "date -s '2001-01-01'; date +%Y")
    assert int(result.stdout.split()[-1]) >= 2025


async def test_timers_and_clock_tricks_do_not_move_the_deadline(box: Sandbox) -> None:
    trick = (
        "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\n"
        "try: time.clock_settime(time.CLOCK_REALTIME, 0)\nexcept OSError as error: print(error, flush=True)\n"
        "time.sleep(60)"
    )
    result = await attack(box, python(trick))
    assert result.timed_out
    assert "not permitted" in result.stdout


async def test_killing_process_1_and_everything_in_reach(box: Sandbox) -> None:
    signals = "kill -9 1; kill -TERM 1; kill -USR1 1; kill -HUP 1; echo lives; kill -9 -1; kill -9 $$"
    result = await attack(box, signals, timeout_s=5)
    assert result.exit_code == 137
    assert result.stdout == "lives\n"


# Looking out


@pytest.fixture
def secret() -> str:
    """A file of the host's, and an environment variable of ours, that no sandbox may see."""
    return "host-secret-" + uuid.uuid4().hex


async def test_the_hosts_files_are_not_there(box: Sandbox, secret: str, tmp_path: Path) -> None:
    hidden = tmp_path / "secret"
    hidden.write_text(secret)
    hidden.chmod(0o644)
    result = await attack(
        box,
        f"cat {hidden}; cat /proc/1/root{hidden}; cat /proc/1/cwd/{hidden}; cat ../../../../..{hidden}; "
        "cat /etc/shadow; ls /root /home/* /var/lib/docker /proc/1/root/root; head -c 1 /proc/kcore",
        timeout_s=10,
    )
    assert secret not in result.stdout
    assert "root:$" not in result.stdout
    assert "root:*" not in result.stdout


async def test_the_hosts_environment_is_not_there(box: Sandbox, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARRING_TEST_SECRET", secret)
    result = await attack(box, "env; cat /proc/*/environ | tr '\\0' '\\n'; set", timeout_s=10)
    assert "PATH=" in result.stdout
    assert "SECRET" not in result.stdout
    assert not any(f"{name}=" in result.stdout for name in os.environ if name.startswith(("PYTEST", "VIRTUAL_ENV")))


async def test_the_hosts_processes_are_not_there(box: Sandbox) -> None:
    result = await attack(box, "ls /proc | grep -c '^[0-9]'; kill -0 " + str(os.getpid()), timeout_s=10)
    assert int(result.stdout) < 12
    assert result.exit_code != 0


async def test_the_docker_socket_is_not_there(box: Sandbox) -> None:
    looking = "ls -la /var/run/docker.sock /run/docker.sock /run/containerd; find / -xdev -type s 2>/dev/null"
    result = await attack(box, looking, timeout_s=10)
    assert ".sock" not in result.stdout


async def test_no_way_out_by_network(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        probe = (
            "import socket\n"
            f"for address in [('127.0.0.1', {port}), ('1.1.1.1', 53), ('169.254.169.254', 80), ('10.0.0.1', 80)]:\n"
            "    try: socket.create_connection(address, 1); print('REACHED', address)\n"
            "    except OSError: pass\n"
            "try: print('REACHED', socket.getaddrinfo('example.org', 80))\nexcept OSError: pass\n"
            "try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('REACHED raw')\nexcept OSError: pass\n"
            "print(open('/proc/net/dev').read().count(':'))\n"
        )
        result = await attack(box, python(probe), timeout_s=15)
    assert "REACHED" not in result.stdout
    assert result.stdout.split()[-1] == "1", "only the loopback device"


async def test_abstract_sockets_of_the_host_are_not_there(box: Sandbox) -> None:
    name = f"\0sparring-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        probe = (
            f"import socket\ntry: socket.socket(socket.AF_UNIX).connect({name!r}); print('REACHED')\n"
            "except OSError: print('no')"
        )
        assert (await attack(box, python(probe), timeout_s=10)).stdout == "no\n"


# Rights


async def test_no_capabilities_no_new_privileges_and_seccomp(box: Sandbox) -> None:
    status = (await attack(box, "id -u; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status")).stdout.split()
    assert status == ["1000", "CapEff:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]


ESCAPES = (
    "mount -t tmpfs none /tmp",
    "unshare -U true",
    "unshare -m true",
    "unshare -n true",
    "mknod /tmp/disk b 8 0",
    "chroot / true",
    "su -c true root",
    "dmesg",
    "touch /etc/passwd",
    "touch /usr/bin/python3",
    "echo 1 > /proc/sys/kernel/panic",
    "echo core > /proc/sys/kernel/core_pattern",
    "echo b > /proc/sysrq-trigger",
    "echo x > /sys/fs/cgroup/memory/release_agent",
    "mkdir /sys/fs/cgroup/memory/mine /sys/fs/cgroup/mine",
    "nsenter -t 1 -m true",
    "cat /proc/1/mem",
    "cat /dev/mem /dev/kmem /dev/vda /dev/sda",
)


async def test_escapes_are_refused(box: Sandbox) -> None:
    results = {escape: await attack(box, escape, timeout_s=5) for escape in ESCAPES}
    assert {escape: result for escape, result in results.items() if result.exit_code == 0} == {}


# By seccomp, or for want of rights. Numbers of x86-64.
SYSCALLS = {
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, 0, 0, 0),
    "keyctl": (250, 0, 0, 0),
    "unshare": (272, 1 << 28),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86-64")
async def test_dangerous_system_calls_are_refused(box: Sandbox) -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print([name for name, call in {SYSCALLS!r}.items() if libc.syscall(*call) != -1 or ctypes.get_errno() != 1])"
    )
    assert (await attack(box, python(code), timeout_s=10)).stdout == "[]\n"


async def test_a_session_survives_all_that_a_command_in_it_does(box: Sandbox) -> None:
    session = await box.session()
    await session.exec("cd /tmp; export KEPT=yes")
    for code in (
        f"trap '' TERM INT; {LINGER}",
        "while :; do :; done",
        "trap '' INT; while :; do :; done",
        "kill -STOP $$",
        "kill -9 $$",
        "exec >&- 2>&- </dev/null; sleep 60",
        f"setsid {LINGER} & wait",
        "cat /dev/zero",
    ):
        started = time.monotonic()
        await session.exec(code, timeout_s=0.5)
        assert time.monotonic() - started < 2.5, code
        kept = await session.exec("pwd; echo $KEPT", timeout_s=10)
        assert kept.stdout.endswith("/tmp\nyes\n"), (code, kept)


async def test_a_fork_bomb_in_a_session(box: Sandbox) -> None:
    session = await box.session()
    started = time.monotonic()
    await session.exec(f"f() {{ f | f & }}; f; {LINGER}", timeout_s=1)
    assert time.monotonic() - started < 3.0
    await asyncio.wait_for(session.close(), 10)


async def test_a_fork_bomb_in_a_sessions_background_does_not_keep_commands_from_running(box: Sandbox) -> None:
    """Else a model could make what scores it fail, and a failure is no reward of 0."""
    session = await box.session()
    await session.exec(BOMB_BEHIND, timeout_s=5)
    while len(processes_with(MARK)) < SPEC.pids // 2:  # noqa: ASYNC110  # until it has gone off
        await asyncio.sleep(0.02)
    result = await attack(box, "echo run", timeout_s=10)
    assert (result.exit_code, result.stdout) == (0, "run\n")
    assert processes_with(MARK) == []


async def test_a_fork_bomb_does_not_keep_a_session_from_starting(box: Sandbox) -> None:
    first = await box.session()
    await first.exec(BOMB_BEHIND, timeout_s=5)
    while len(processes_with(MARK)) < SPEC.pids // 2:  # noqa: ASYNC110  # until it has gone off
        await asyncio.sleep(0.02)
    tool = PythonTool(box, timeout_s=20)
    assert await tool.python("2 + 3") == "5"
    assert (await first.exec("echo back", timeout_s=20)).stdout == "back\n"


# Tools

KNOWS_ITS_MARK = """
import os, sys
frame = sys._getframe()
while "order" not in frame.f_globals or "mark" not in frame.f_globals["order"]:
    frame = frame.f_back
os.write(1, b"\\x1e" + frame.f_globals["order"]["mark"].encode() + b" 0 ")
while True:
    os.write(1, b"x" * 65536)
"""


async def test_output_behind_a_forged_end_mark_is_bounded(box: Sandbox) -> None:
    tool = PythonTool(box, timeout_s=2)
    started = time.monotonic()
    said = await tool.python(KNOWS_ITS_MARK)
    assert time.monotonic() - started < 4.5
    assert len(said) < 40_000
    assert "timed out" in said
    assert "5" in await tool.python("2 + 3")


async def test_a_pipe_in_the_place_of_a_file_is_the_models_mistake(box: Sandbox) -> None:
    """Not a broken sandbox: that would be a failure of the infrastructure, which is never scored."""
    editor = EditorTool(box, timeout_s=1)
    await attack(box, "mkfifo pipe; ln -s pipe link; mkdir folder; ln -s /dev/zero zero", timeout_s=10)
    for name in ("pipe", "link", "folder", "zero"):
        assert "something else than a file" in await editor.create_file(name, "x"), name
    for name in ("pipe", "link", "zero"):
        assert "no such file" in await editor.view_file(name), name
    swap = "while :; do rm -f f; mkfifo f; sleep 0.01; rm -f f; echo x > f; sleep 0.01; done"
    session = await box.session()
    await session.exec(f"({swap}) >/dev/null 2>&1 &", timeout_s=10)
    for _ in range(8):
        started = time.monotonic()
        with contextlib.suppress(SandboxRequestError):
            await box.write("f", "y", timeout_s=0.5)
        assert time.monotonic() - started < 10
    await session.close()


async def test_files_that_are_too_much_for_an_editor(box: Sandbox) -> None:
    editor = EditorTool(box, timeout_s=10)
    make = "head -c 9000000 /dev/zero | tr '\\0' x > long; head -c 50000 long > line; seq 100000 > lines"
    assert (await attack(box, make, 10)).ok
    assert "more than 8388608 bytes" in await editor.view_file("long")
    assert len(await editor.view_file("line")) < 3000
    assert len(await editor.view_file("lines")) < 40_000
    assert "does not occur" in await editor.replace_in_file("line", "y" * 50_000, "z")
    await attack(box, "mkdir many && cd many && seq 20000 | xargs touch", 10)
    assert len(await editor.view_file("many")) < 40_000
