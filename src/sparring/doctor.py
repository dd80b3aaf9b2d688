"""`sparring doctor`: which sandboxes this machine has, what holds inside them, how fast they are; all of it tried."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from sparring.display import open_console
from sparring.errors import SparringError
from sparring.sandbox import Sandbox, SandboxProvider, SandboxSpec, open_provider
from sparring.sandbox.cgroup import cgroup_bases
from sparring.sandbox.docker import DockerProvider
from sparring.sandbox.seccomp import seccomp_program

__all__ = ["doctor", "examine"]

_SPEC = SandboxSpec(memory_mib=128, disk_mib=32, pids=64)
_ROUNDS = 3
# Run inside a sandbox: what the hardening comes to there. Each line is "name: value".
_LOOK = r"""
echo "user: $(id -u)"
sed -n 's/^CapEff:\s*/capabilities: /p; s/^NoNewPrivs:\s*/no new privileges: /p; s/^Seccomp:\s*/seccomp: /p' \
  /proc/self/status
touch /usr/.sparring 2>/dev/null && echo "system folders: WRITABLE" || echo "system folders: read-only"
echo "network devices: $(grep -c : /proc/net/dev) (1 is the loopback alone)"
df -P . | awk 'NR == 2 { print "work folder: " $1 ", " int($2 / 1024) " MiB" }'
command -v python3 bash >/dev/null && echo "python3 and bash: yes" || echo "python3 and bash: NO"
"""

Findings = dict[str, str]


async def examine(kind: str) -> Findings:
    """Start sandboxes of this kind and say what was found.

    Raises:
        SparringError: it cannot be used here, with what to do.
    """
    provider = await open_provider(kind)  # type: ignore[arg-type]
    async with provider:
        findings = await _backend(provider)
        starts: list[float] = []
        for _ in range(_ROUNDS):
            sandbox = await _timed(lambda: provider.take(_SPEC), starts)
            if len(starts) < _ROUNDS:
                await sandbox.stop()
        async with sandbox:
            findings |= await _inside(sandbox)
            findings |= await _latencies(sandbox, starts)
    return findings


async def _backend(provider: SandboxProvider) -> Findings:
    if isinstance(provider, DockerProvider):
        return await provider.daemon.call(lambda: _daemon(provider.daemon.host, provider.daemon.api))
    process = await asyncio.create_subprocess_exec("bwrap", "--version", stdout=asyncio.subprocess.PIPE)
    version, _ = await asyncio.wait_for(process.communicate(), 10)
    bases = cgroup_bases()
    version_of_groups = 1 if len(set(bases.values())) > 1 else 2
    limits = f"control groups, version {version_of_groups}" if bases else "prlimit, each process"
    return {
        "version": version.decode().strip(),
        "limits": f"by {limits}",
        "system call filter": f"{len(seccomp_program() or b'') // 8} instructions",
    }


def _daemon(host: str, api: Any) -> Findings:
    info: Mapping[str, Any] = api.info()
    names = [name for image in api.images() for name in image["RepoTags"] or () if name.startswith("sparring/")]
    limits = {"memory": "MemoryLimit", "swap": "SwapLimit", "cpu": "CpuCfsQuota", "pids": "PidsLimit"}
    return {
        "daemon": host,
        "version": f"{info['ServerVersion']} (API {api.api_version})",
        "storage driver": info["Driver"],
        "cgroup": f"version {info.get('CgroupVersion', '1')}, driver {info['CgroupDriver']}",
        "limits": ", ".join(f"{what} {'yes' if info.get(key) else 'NO'}" for what, key in limits.items()),
        "security": ", ".join(info.get("SecurityOptions") or ()) or "NONE",
        "images": ", ".join(sorted(names)) or "none; build them: make images",
    }


async def _inside(sandbox: Sandbox) -> Findings:
    looked = await sandbox.exec(_LOOK, timeout_s=20)
    return dict(line.split(": ", 1) for line in looked.stdout.splitlines() if ": " in line)


async def _latencies(sandbox: Sandbox, starts: list[float]) -> Findings:
    execs: list[float] = []
    calls: list[float] = []
    session = await sandbox.session()
    for _ in range(_ROUNDS + 2):
        await _timed(lambda: sandbox.exec(["true"]), execs)
        await _timed(lambda: session.exec("true"), calls)
    times = {"start": starts, "exec": execs, "exec in a session": calls}
    return {what: f"{statistics.median(values) * 1000:.1f} ms" for what, values in times.items()}


async def _timed(call: Callable[[], Awaitable[Any]], into: list[float]) -> Any:
    started = time.perf_counter()
    result = await call()
    into.append(time.perf_counter() - started)
    return result


async def _examine_all() -> dict[str, Findings]:
    found: dict[str, Findings] = {}
    for kind in ("docker", "bubblewrap"):
        try:
            found[kind] = await examine(kind)
        except SparringError as error:
            found[kind] = {"unusable": str(error)}
    return found


def doctor(argv: Sequence[str] = ()) -> int:
    """Print the report; the exit status is 0 if some sandbox isolates here, else 1."""
    parser = argparse.ArgumentParser(prog="sparring doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(argv)
    found = asyncio.run(_examine_all())
    usable = [kind for kind, findings in found.items() if "unusable" not in findings]
    if arguments.json:
        print(json.dumps({"auto": usable[0] if usable else None, **found}, indent=1))
        return 0 if usable else 1
    console = open_console()
    for kind, findings in found.items():
        table = Table(show_header=False, box=None, title=kind, title_justify="left", title_style="bold")
        for what, value in findings.items():
            table.add_row(what, value)
        console.print(table)
        console.print()
    if usable:
        console.print(f"sandbox=auto takes {usable[0]}.", highlight=False)
    else:
        advice = "sandbox=auto refuses: nothing here isolates. Start a Docker daemon, or install bubblewrap."
        console.print(advice, highlight=False)
    return 0 if usable else 1
