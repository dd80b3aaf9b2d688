"""Removal of what an earlier run left in a Docker daemon, and of nothing that another live run still uses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from sparring.sandbox.owner import Owner

__all__ = ["DEADLINE_LABEL", "OWNER_LABEL", "is_left_over", "labels", "reap"]

OWNER_LABEL = "sparring.owner"
DEADLINE_LABEL = "sparring.deadline"


def labels(owner: Owner, lifetime_s: float) -> dict[str, str]:
    """The labels by which everything that a run makes in a daemon is found again."""
    return {OWNER_LABEL: str(owner), DEADLINE_LABEL: str(int(time.time() + lifetime_s))}


def is_left_over(found: dict[str, str]) -> bool:
    """Whether something with these labels may be removed: its owner has certainly ended, or its deadline is past.

    Of owners on other machines nothing is known, so theirs live until their deadline.
    """
    owner = Owner.parse(found.get(OWNER_LABEL, ""))
    deadline = found.get(DEADLINE_LABEL, "")
    return (owner is not None and owner.is_dead()) or (deadline.isdigit() and time.time() > int(deadline))


def reap(api: Any, condemned: Callable[[dict[str, str]], bool] = is_left_over) -> int:
    """Remove the containers and volumes with our labels that are `condemned`. Blocking; returns how many.

    What vanishes meanwhile, or is being removed by another reaper, is fine.
    """
    import docker.errors

    removed = 0
    by_label = {"label": OWNER_LABEL}
    for container in api.containers(all=True, filters=by_label):
        if condemned(container["Labels"]):
            with contextlib.suppress(docker.errors.APIError):
                api.remove_container(container["Id"], force=True, v=True)
                removed += 1
    for volume in api.volumes(filters=by_label)["Volumes"] or ():
        if condemned(volume["Labels"]):
            with contextlib.suppress(docker.errors.APIError):
                api.remove_volume(volume["Name"])
                removed += 1
    return removed
