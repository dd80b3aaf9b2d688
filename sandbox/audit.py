"""What sandboxes leave behind: for tests, benchmarks and `sparring doctor`. The answer should be nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparring.extras import installed
from sparring.sandbox.cgroup import cgroup_bases
from sparring.sandbox.owner import Owner
from sparring.sandbox.reaper import OWNER_LABEL

__all__ = ["descendants", "left_over", "own_usage"]

_DAEMONS = ("docker", "containerd")  # their folders, wherever they lie, have these names in them


def left_over(owners: Iterable[Owner | None], host: str | None = None) -> dict[str, list[str]]:
    """Containers, volumes, networks and control groups of these processes; only what there is. Blocking.

    Docker is asked at `host`, else DOCKER_HOST, else the local socket; no daemon has nothing.
    """
    names = {str(owner) for owner in owners}
    found: dict[str, list[str]] = {}
    found |= _in_docker(names, host)
    groups = [folder for base in set(cgroup_bases().values()) for folder in base.glob("sparring.*")]
    found["control groups"] = [str(folder) for folder in groups if folder.name.split(".")[1] in names]
    return {what: which for what, which in found.items() if which}


def _in_docker(owners: set[str], host: str | None) -> dict[str, list[str]]:
    if not installed("docker"):
        return {}
    import docker

    try:
        api: Any = docker.APIClient(base_url=host or os.environ.get("DOCKER_HOST"), version="auto", timeout=30)
    except docker.errors.DockerException:
        return {}
    labelled = {"label": OWNER_LABEL}
    with contextlib.closing(api):
        things = {
            "containers": api.containers(all=True, filters=labelled),
            "volumes": api.volumes(filters=labelled)["Volumes"] or [],
            "networks": api.networks(filters=labelled),
        }
    return {
        what: [thing.get("Id") or thing["Name"] for thing in found if thing["Labels"].get(OWNER_LABEL) in owners]
        for what, found in things.items()
    }


def descendants(pid: int) -> list[int]:
    """Process ids of the children of `pid`, of theirs, and so on (Linux)."""
    try:
        children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []
    return [one for child in children for one in (child, *descendants(child))]


def _mount_points() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def own_usage() -> dict[str, int]:
    """Counts that grow if this process leaks (Linux). A daemon's mounts for containers, whosever they are, are not in
    them: `left_over` has the containers."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": len(descendants(os.getpid())),
        "mounts": sum(not any(name in place for name in _DAEMONS) for place in _mount_points()),
        "temporary folders": sum(name.startswith("sparring-") for name in os.listdir(tempfile.gettempdir())),
    }
