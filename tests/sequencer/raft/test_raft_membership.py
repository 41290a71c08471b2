"""Membership of a node: which states it accepts, and when the join of a disk counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pysyncobj.syncobj
import pytest
from raft_bench import (
    CLUSTER,
    Clock,
    Driven,
    Lockstep,
    Member,
    claim_of,
    config_of,
    disk_id,
    entries_of,
    of_kind,
)
from raft_members import NAMES, first_state, joins_in, member, other_than, reconnect

from rt.cluster_epoch import epoch_of
from rt.errors import ClusterMismatch
from sequencer.raft.model.cluster_state import INITIAL
from sequencer.raft.model.entry_codec import (
    JoinEntry,
    encode_join,
)
from sequencer.raft.model.messages import (
    Admit,
    AppendEntries,
    DiskClaim,
    Forward,
    InstallSnapshot,
    LogIndex,
)


def test_node_with_other_members_than_its_cluster_raises_cluster_mismatch(clock: Clock) -> None:
    """V1: if one of three nodes was configured with five members, the nodes counted two different
    majorities.
    """
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    disk = cluster.kill("n3")
    with pytest.raises(ClusterMismatch, match="configured members are not"):
        Member(config_of("n3", NAMES), disk.after_power_cut("all"))
    cluster.start("n3", disk.after_power_cut("all"))
    cluster.commit(b"two")
    cluster.converge()


def _adopted(driven: Driven, content: bytes) -> None:
    driven.hear("n3", Admit(content))


def _installed(driven: Driven, content: bytes) -> None:
    driven.hear("n3", InstallSnapshot(2, INITIAL, len(content), hashlib.sha256(content).digest(), 0, content))


@pytest.mark.parametrize("give", [_adopted, _installed])
def test_blank_node_accepts_only_state_of_its_configured_members(
    clock: Clock, give: Callable[[Driven, bytes], None]
) -> None:
    """V1: a new node with five configured members took the state of a three-node cluster, and was
    admitted.
    """
    driven = Driven(clock, config_of("n4", NAMES))
    driven.up("n3")
    give(driven, first_state(NAMES[:4]))
    give(driven, first_state([*NAMES[:4], "n6"]))
    driven.step()
    assert (driven.status.cluster, driven.status.snapshot) == ("", 0)
    give(driven, first_state(NAMES))
    driven.step()
    assert (driven.status.cluster, driven.status.snapshot) == (CLUSTER.hex(), 1)


def test_unreadable_snapshot_is_rejected_and_node_reopens(clock: Clock) -> None:
    """V11: a leader's snapshot got its final name before it was checked, and the node never started again."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    later = b"a state of a later version"
    driven.hear(
        "n2", InstallSnapshot(2, LogIndex(50, 2), len(later), hashlib.sha256(later).digest(), 0, later)
    )
    driven.step()
    assert (driven.status.snapshot, driven.status.applied) == (1, 3)
    assert driven.reopened().append(2, LogIndex(3, 2), entries_of([2], start=4), commit=4).matched


def test_member_without_first_state_accepts_later_state(clock: Clock) -> None:
    """Only the first state was offered. After the loss of another disk, no node could become leader any
    more.
    """
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1)
    cluster.drop_message = lambda _sender, to, _message: to == "n3"
    cluster.commit(b"without n3", via="n1")
    cluster.run(lambda: cluster.members["n2"].status.snapshot > INITIAL.index)
    assert cluster.members["n3"].status.cluster == ""
    cluster.drop_message = lambda _sender, _to, _message: False
    cluster.wipe("n1")
    cluster.restart("n3")
    cluster.commit(b"with n3", via="n2")
    cluster.run(lambda: cluster.members["n1"].raft.is_counted_here)
    cluster.converge()
    assert cluster.members["n3"].node.claim == claim_of("n3", 0, INITIAL)


def test_late_join_of_replaced_disk_is_ignored(clock: Clock) -> None:
    """A forwarded join could be appended after the join of the disk in use."""
    cluster = Lockstep(clock)
    leader = cluster.lead()
    name = other_than(cluster, leader.name)
    third = other_than(cluster, leader.name, name)
    cluster.wipe(name)
    cluster.run(lambda: cluster.members[name].raft.is_counted_here)
    cluster.converge()
    before = leader.log.last
    leader.wire.put(third, Forward(encode_join(JoinEntry(name, disk_id(name, 0)))))
    cluster.idle(0.2)
    assert leader.log.last == before
    assert leader.raft.peer_disks.is_counted(name)


def test_join_of_deposed_leader_is_not_forwarded_to_next_leader(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A join that waited when a leader was deposed went to the next leader, which appended it late."""
    driven = member(clock)
    term = driven.lead()
    reconnect(driven, "n3", claims={"n3": DiskClaim(disk_id("n3", 1))})
    with monkeypatch.context() as busy:  # The round's time is over before it handles waiting commands.
        busy.setattr(pysyncobj.syncobj.SyncObj, "_checkCommandsToApply", lambda _raft: None)
        driven.step()
    assert joins_in(driven) == [JoinEntry("n3", disk_id("n3", 1))]
    sent = driven.hear_all("n2", AppendEntries(term + 1, INITIAL, 1, 0, 0, entries_of([term + 1])))
    assert (driven.raft.leader, joins_in(driven)) == ("n2", [])
    assert of_kind(sent + driven.step() + driven.step(), Forward) == []


def test_disk_with_changing_claims_costs_one_join_per_election_timeout(clock: Clock) -> None:
    """V28: a leader asked for the join of each disk once in a term. Without that bound, each message could
    cost an entry.
    """
    driven = member(clock)
    driven.lead()
    for turn in range(50):
        driven.acknowledge("n3", 1, claim=DiskClaim(disk_id("n3", 1 + turn % 2)))
    assert len(joins_in(driven)) == 1
    for _ in range(2):
        driven.clock.advance(driven.config.election_ms_max / 1999)
        driven.acknowledge("n2", driven.log.last.index)
    for turn in range(50):
        driven.acknowledge("n3", 1, claim=DiskClaim(disk_id("n3", 1 + turn % 2)))
    assert [join.disk for join in joins_in(driven)] == [disk_id("n3", 1), disk_id("n3", 2)]


def test_peer_of_another_cluster_stays_excluded_after_blank_node_adopts_state(clock: Clock) -> None:
    """V13: after the adoption the peer counted as connected, was sent our entries, and its disk was
    admitted.
    """
    driven = Driven(clock, config_of("n1", NAMES[:3]))
    stranger = {"cluster": b"another cluster!", "claims": {"n3": DiskClaim(b"a foreign disk..", INITIAL)}}
    driven.up("n3", **stranger)
    driven.up("n2")
    driven.hear("n2", Admit(first_state(NAMES[:3])))
    driven.step()
    driven.up("n2")
    driven.up("n3", **stranger)
    driven.step()
    driven.wire.sent.clear()
    driven.lead()
    driven.acknowledge("n2", driven.log.last.index)
    driven.clock.advance(0.1)
    driven.step()
    assert of_kind(driven.wire.sent, AppendEntries, "n2")
    assert [kind for kind in (AppendEntries, InstallSnapshot) if of_kind(driven.wire.sent, kind, "n3")] == []
    assert joins_in(driven) == []


def test_cluster_mismatch_after_forced_epoch_requires_more_than_one_peer(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """V19: a single hello of a higher epoch ended every node that received it, in every run."""
    driven = member(clock, 5)
    forced = epoch_of(1 << 16, 9)
    for generation in range(2, 9):
        reconnect(driven, "n2", epoch=epoch_of(generation << 16, 7))
    assert "refused_peer peer=n2" in caplog.text
    reconnect(driven, "n3", epoch=forced)
    driven.wire.drop("n2")
    driven.step()
    reconnect(driven, "n4", epoch=forced)
    with pytest.raises(ClusterMismatch, match="from another node's state"):
        reconnect(driven, "n5", epoch=forced)
