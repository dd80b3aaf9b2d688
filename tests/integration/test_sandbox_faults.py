"""The infrastructure breaks: a failure of kind `sandbox`, in time, and never a result that could be scored."""

import asyncio
import contextlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sparring.errors import SandboxError
from sparring.sandbox import SandboxSpec, bubblewrap, open_provider
from sparring.sandbox.audit import left_over
from sparring.sandbox.bubblewrap import BubblewrapProvider, BubblewrapSandbox
from sparring.sandbox.docker import DockerProvider
from sparring.sandbox.owner import Owner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SPEC = SandboxSpec(memory_mib=128, disk_mib=32, pids=64)


TINY = "sparring/tiny:latest"


class PrivateDaemon:
    """A Docker daemon of the test's own, which may be killed without hurting anybody."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for stale in (self.folder / "pid", self.folder / "exec" / "containerd" / "containerd.pid"):
            stale.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("dockerd", "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"),
                    *("--pidfile", f"{self.folder}/pid", "--host", self.host, "--bridge=none", "--iptables=false"),
                    *("--ip-forward=false", "--ip-masq=false"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "-H", self.host, "version"], capture_output=True, timeout=20).returncode:
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> None:
        """By SIGKILL its containerd dies with it, and the containers' processes live on."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._process = None

    def docker(self, *arguments: str) -> list[str]:
        command = ["docker", "-H", self.host, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()

    def remove_everything(self) -> None:
        """Also what a test that failed left: the shims and mounts under the folder."""
        with contextlib.suppress(subprocess.CalledProcessError):
            for container in self.docker("ps", "--all", "--quiet"):
                self.docker("rm", "--force", container)
        self.end(signal.SIGTERM)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if Path(mounted := line.split(" ")[4]).is_relative_to(self.folder):
                subprocess.run(["umount", "--lazy", mounted], check=False)


def tiny_root() -> bytes:
    """A root file system with a few of this machine's programs: loading a whole image would take most of the test."""
    programs = ["/bin/sh", "/bin/bash", "/bin/mkfifo", "/bin/rm", "/bin/cat", "/bin/sleep", "/usr/bin/timeout"]
    linked = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True, timeout=20).stdout
    libraries = {word for word in linked.split() if word.startswith("/") and not word.endswith(":")}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for path in (*programs, *sorted(libraries)):
            archive.add(path)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def private_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("a daemon of one's own needs root and dockerd")
    folder = tmp_path_factory.mktemp("dockerd")
    daemon = PrivateDaemon(folder)
    daemon.start()
    try:
        importing = ["docker", "-H", daemon.host, "import", "-", TINY]
        subprocess.run(importing, input=tiny_root(), check=True, capture_output=True, timeout=60)
        yield daemon
    finally:
        daemon.remove_everything()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.docker
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "restarted"])
async def test_the_daemon_goes_away_in_mid_episode(private_daemon: PrivateDaemon, number: signal.Signals) -> None:
    spec = replace(SPEC, image=TINY)
    async with DockerProvider(private_daemon.host) as provider:
        sandbox = await provider.take(spec)
        session = await sandbox.session()
        running = asyncio.create_task(sandbox.exec("sleep 30", timeout_s=3))
        in_session = asyncio.create_task(session.exec("sleep 30", timeout_s=3))
        await wait_until(lambda: len(sandbox._processes) == 2)  # type: ignore[attr-defined]
        started = time.monotonic()
        await asyncio.to_thread(private_daemon.end, number)
        for call in (running, in_session):
            with pytest.raises(SandboxError) as caught:
                await call
            assert caught.value.kind == "sandbox"
        assert time.monotonic() - started < 3 + 2
        with pytest.raises(SandboxError):
            await sandbox.exec("true", timeout_s=3)
        with pytest.raises(SandboxError):
            await provider.take(spec, timeout_s=3)
        assert not await sandbox.alive()
        await sandbox.stop()

        await asyncio.to_thread(private_daemon.start)
        with pytest.raises(SandboxError):  # back, but this sandbox's processes are not
            await sandbox.exec("true", timeout_s=3)
        async with await provider.take(spec) as fresh:
            assert (await fresh.exec("echo back", timeout_s=20)).stdout == "back\n"
    left = await asyncio.to_thread(private_daemon.docker, "ps", "--all", "--quiet")
    assert left == [], "what could not be removed while the daemon was away is removed at close"


@pytest.mark.docker
async def test_a_container_that_somebody_removes_is_a_failure_not_a_result() -> None:
    async with await open_provider("docker") as provider, await provider.take(SPEC) as sandbox:
        running = asyncio.create_task(sandbox.exec("sleep 30", timeout_s=5))
        await wait_until(lambda: len(sandbox._processes) == 1)  # type: ignore[attr-defined]
        await asyncio.to_thread(docker, "rm", "--force", f"sparring-{sandbox.id}")
        with pytest.raises(SandboxError):
            await running
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.exec("true")


@pytest.mark.docker
async def test_a_missing_image_says_how_to_get_it_and_is_not_pulled() -> None:
    async with await open_provider("docker") as provider:
        with pytest.raises(SandboxError, match=r"No such image.*make images"):
            await provider.take(SandboxSpec(image="sparring/not-there:latest"))


@pytest.mark.docker
async def test_a_start_that_is_given_up_leaves_no_container() -> None:
    async with await open_provider("docker") as provider:
        sandbox = provider.make(SPEC)
        with pytest.raises((SandboxError, TimeoutError)):
            await asyncio.wait_for(sandbox.start(), 0.02)
        left = await asyncio.to_thread(docker, "ps", "--all", "--quiet", "--filter", f"name=sparring-{sandbox.id}")
        assert left == []


async def test_no_daemon_says_what_is_missing(tmp_path: Path) -> None:
    provider = DockerProvider(f"unix://{tmp_path}/nothing")
    started = time.monotonic()
    with pytest.raises(SandboxError, match="no Docker daemon answers"):
        await provider.open()
    assert time.monotonic() - started < 5
    await provider.close()


@pytest.mark.bubblewrap
async def test_without_root_a_process_holds_the_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of users without root, walked as root: by a user namespace and a holder."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    async with await open_provider("bubblewrap") as provider, await provider.take(SPEC) as sandbox:
        assert (await sandbox.exec("id -u; echo x > f; cat f", timeout_s=10)).stdout == "1000\nx\n"
        assert isinstance(sandbox, BubblewrapSandbox)
        assert sandbox._overlay is not None
        holder = sandbox._overlay.holder
        assert holder is not None
        os.kill(holder.pid, signal.SIGKILL)
        await wait_until(holder.finished.done)
        assert not await sandbox.alive()
        with pytest.raises(SandboxError, match="not running"):
            await sandbox.exec("true")


@pytest.mark.bubblewrap
async def test_what_bubblewrap_cannot_run_is_a_failure_not_exit_code_1() -> None:
    async with await open_provider("bubblewrap") as provider, await provider.take(SPEC) as sandbox:
        assert isinstance(sandbox, BubblewrapSandbox)
        assert sandbox._overlay is not None
        sandbox._overlay.plan = replace(sandbox._overlay.plan, mount_point="/proc")  # nothing to bind there
        with pytest.raises(SandboxError, match=r"bubblewrap could not run.*bwrap"):
            await sandbox.exec("true")


@pytest.mark.bubblewrap
async def test_an_overlay_that_cannot_be_mounted_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    async with await open_provider("bubblewrap") as provider:
        sandbox = provider.make(replace(SPEC, image=str(tmp_path)))
        assert isinstance(sandbox, BubblewrapSandbox)
        sandbox._lower = f"{tmp_path}/not-there"
        with pytest.raises(SandboxError, match="could not be mounted"):
            await sandbox.start()
        assert left_over([Owner.current()]) == {}


async def test_auto_takes_what_there_is_never_the_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing")
    if shutil.which("bwrap"):
        async with await open_provider("auto") as provider:
            assert isinstance(provider, BubblewrapProvider)
    monkeypatch.setitem(bubblewrap._HOST_ENV, "PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*local.*isolates nothing.*no Docker daemon"):
        await open_provider("auto")


@pytest.mark.docker
async def test_auto_takes_docker_where_a_daemon_answers() -> None:
    async with await open_provider("auto") as provider:
        assert provider.kind == "docker"


def docker(*arguments: str) -> list[str]:
    command = ["docker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the state of another process
            await asyncio.sleep(0.01)
