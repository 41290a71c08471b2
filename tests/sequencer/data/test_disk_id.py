"""The id of a data directory's disk: once returned, it stays the same across kills and power cuts."""

from __future__ import annotations

import contextlib

import pytest
from disks import MemoryDisk, PowerCut

from sequencer.sessions.disk_id import open_disk_id

SESSIONS = "/node/s/sessions"


@pytest.mark.parametrize("change", range(1, 13))
def test_returned_disk_id_survives_power_cut_after_interrupted_creation(
    change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = MemoryDisk()
    for path, above in (("/node", "/"), ("/node/s", "/node")):
        disk.make_directory(path)
        disk.sync_directory(above)
    left = change

    def is_killed(_operation: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise PowerCut

    with monkeypatch.context() as killing:
        killing.setattr(disk, "check", is_killed)
        with contextlib.suppress(PowerCut):
            open_disk_id(SESSIONS, disk=disk)
    told = open_disk_id(SESSIONS, disk=disk)
    assert open_disk_id(SESSIONS, disk=disk.after_power_cut("none")) == told
