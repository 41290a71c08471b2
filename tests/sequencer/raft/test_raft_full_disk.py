"""A full disk in Raft: the node does not lead while it lasts, and continues when there is space."""

from __future__ import annotations

import errno
import hashlib
import logging

import pytest
from raft_bench import (
    CLUSTER,
    Clock,
    Driven,
    Lockstep,
    claim_of,
    config_of,
    disk_id,
)
from raft_members import NAMES, first_state

from rt.errors import DiskFull
from sequencer.raft.model.cluster_state import INITIAL
from sequencer.raft.model.entry_codec import (
    JoinEntry,
    encode_join,
)
from sequencer.raft.model.messages import (
    Admit,
    InstallSnapshot,
    LogIndex,
    RaftEntry,
)


def test_node_continues_after_enospc_in_log_compaction_and_compacts_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V18: the process ended if the log could not be shortened."""
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1, segment_bytes=300)
    leader = cluster.lead()
    remove = leader.disk.remove

    def is_full(path: str) -> None:
        if "/log." in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        remove(path)

    monkeypatch.setattr(leader.disk, "remove", is_full)
    before = leader.log.base.index
    for at in range(5):
        cluster.commit(b"%d" % at * 100, via=leader.name)
        cluster.idle(0.2)
    assert "compaction_failed" in caplog.text
    monkeypatch.setattr(leader.disk, "remove", remove)
    cluster.commit(b"there is space", via=leader.name)
    cluster.idle(0.3)
    assert leader.log.base.index > before + 3
    assert sum("log." in path for path in leader.disk.paths()) < 5
    cluster.converge()


def test_full_disk_delays_recording_of_own_join(clock: Clock) -> None:
    """V18: the node ended when the file with its identity could not be written."""
    asked: list[DiskFull] = []
    driven = Driven(clock, config_of("n1", NAMES[:3]), generation=1, on_disk_full=asked.append)
    driven.up()
    driven.step()
    _installed_from_n2(driven, first_state(NAMES[:3]))
    driven.append(2, INITIAL, [RaftEntry(encode_join(JoinEntry("n1", disk_id("n1", 1))), 2, 2)], commit=1)
    driven.disk.fail("create", error=errno.ENOSPC, times=3)
    driven.append(2, LogIndex(2, 2), commit=2)
    assert len(asked) == 3
    assert driven.node.claim == claim_of("n1", 1, LogIndex(2, 2))
    assert driven.reopened("none").node.claim == driven.node.claim


def test_full_disk_delays_adoption_of_first_snapshot(clock: Clock) -> None:
    """The node ended when the first snapshot of a new cluster could not be written."""
    asked: list[DiskFull] = []
    driven = Driven(clock, config_of("n1", NAMES[:3]), on_disk_full=asked.append)
    driven.up("n2", cluster=CLUSTER)
    driven.disk.fail("create", error=errno.ENOSPC, times=2)
    driven.hear("n2", Admit(first_state(NAMES[:3])))
    assert len(asked) == 2
    assert driven.status.cluster == CLUSTER.hex()
    assert driven.reopened("none").status.cluster == CLUSTER.hex()


def _installed_from_n2(driven: Driven, content: bytes) -> None:
    driven.hear("n2", InstallSnapshot(2, INITIAL, len(content), hashlib.sha256(content).digest(), 0, content))
    driven.step()
    assert driven.status.cluster == CLUSTER.hex()
    driven.up()
    driven.step()


def test_node_with_full_disk_is_not_leader_and_logs_every_occurrence(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """V8: the node reported itself as leader for hours, and a second full disk in one run was not logged."""
    caplog.set_level(logging.INFO, "sequencer.raft")
    seen: list[tuple[str, str | None, bool]] = []

    def on_disk_full(_error: DiskFull) -> None:
        seen.append((driven.status.role, driven.status.leader, driven.node.is_leader))
        driven.disk.capacity_bytes = None

    driven = Driven(clock, config_of("n1", NAMES[:3]), on_disk_full=on_disk_full)
    driven.adopt()
    driven.lead()
    for _ in range(2):
        driven.acknowledge("n2", driven.log.last.index)
        driven.step()
        assert driven.node.is_leader
        driven.disk.capacity_bytes = 0
        driven.propose(bytes(100_000))
        driven.step()
        driven.step()
    assert seen == [("stalled", None, False)] * 2
    assert driven.status.role == "leader"
    assert caplog.text.count("disk_full ") == caplog.text.count("disk_has_space") == 2
