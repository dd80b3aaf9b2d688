"""What counts as left behind."""

import pytest

from sparring.sandbox import audit


def test_mounts_of_other_peoples_containers_are_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["/", "/proc"]
    monkeypatch.setattr(audit, "_mount_points", lambda: places)
    before = audit.own_usage()["mounts"]
    places += ["/var/lib/docker/overlay2/0f/merged", "/var/lib/mine-docker/exec/netns/default", "/tmp/sparring-1/disk"]
    assert audit.own_usage()["mounts"] - before == 1
