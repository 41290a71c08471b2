"""Cluster creation, disks that were replaced or joined, and replicas that diverged.

Rule n is of docs/raft.md.
"""

from __future__ import annotations

import pytest
from disks import Keep, PowerCut
from paper_members import AFTER, NAMES, Snapshot, clear_leader, member
from raft_bench import (
    CLUSTER,
    Clock,
    Driven,
    Lockstep,
    claim_of,
    config_of,
    disk_id,
    entries_of,
    of_kind,
    only,
)

from rt.errors import Diverged
from sequencer.raft.model.cluster_state import INITIAL, encode_state, initial_state
from sequencer.raft.model.entry_codec import (
    JoinEntry,
    encode_join,
)
from sequencer.raft.model.messages import (
    NO_ID,
    Admit,
    AppendEntries,
    AppendEntriesReply,
    DiskClaim,
    FetchState,
    LogIndex,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
)

# --- Which disks count: rule 6 ---------------------------------------------------------------------------


def test_blank_members_form_one_cluster(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"x")
    cluster.converge()
    assert {member.status.cluster for member in cluster.members.values()} == {b"made by n1      ".hex()}
    assert all(member.status.epoch == 1 for member in cluster.members.values())


def test_cluster_is_created_only_when_all_members_are_present(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.kill("n3")
    cluster.idle(3)
    assert [member.status.role for member in cluster.members.values()] == ["joining", "joining"]
    cluster.start("n3")
    cluster.commit(b"x")


def test_member_absent_at_cluster_creation_counts_without_join(clock: Clock) -> None:
    """Its blank disk existed when the cluster was created, so it takes the leader's snapshot without a
    join.
    """
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1)
    cluster.drop_message = lambda _sender, to, _message: to == "n3"
    cluster.commit(b"without n3", via="n1")
    cluster.idle(0.3)
    assert cluster.members["n1"].status.snapshot > 1
    assert cluster.members["n3"].status.role == "joining"
    cluster.drop_message = lambda _sender, _to, _message: False
    cluster.commit(b"with n3", via="n3")
    cluster.converge()
    assert cluster.members["n3"].node.claim == claim_of("n3", 0, INITIAL)


def test_cluster_is_created_only_if_a_member_has_bootstrap_set(clock: Clock) -> None:
    cluster = Lockstep(clock, bootstrap=False)
    cluster.idle(3)
    assert {member.status.role for member in cluster.members.values()} == {"joining"}
    cluster.restart("n2", bootstrap=True)
    cluster.commit(b"x")


def test_wiped_majority_with_bootstrap_does_not_create_second_cluster(clock: Clock) -> None:
    """Two of three nodes were wiped, and all have bootstrap set. Nothing is admitted, and nothing is
    committed.
    """
    cluster = Lockstep(clock)
    cluster.commit(b"kept")
    cluster.converge()
    for name in ("n1", "n2"):
        cluster.wipe(name)
    survivor = cluster.members["n3"]
    [future] = survivor.propose(b"more")
    cluster.idle(5)
    assert [cluster.members[name].status.role for name in ("n1", "n2")] == ["joining", "joining"]
    assert (survivor.commands, survivor.status.committed, future.done()) == (
        [b"kept"],
        survivor.log.last.index,
        False,
    )
    assert survivor.raft.role == "follower"


@pytest.mark.parametrize("name", ["n1", "n3"])
@pytest.mark.parametrize("keep", ["none", "some", "all"])
def test_cluster_is_created_only_once_after_power_cut_at_any_write(
    clock: Clock, name: str, keep: Keep
) -> None:
    """n1 creates the cluster, and n3 adopts its state. Each step is durable before the next."""
    for change in range(1, 60):
        cluster = Lockstep(clock)
        cluster.disks[name].cut_power_at(cluster.disks[name].changes + change)
        try:
            cluster.commit(b"first")
            cluster.idle(0.1)
        except PowerCut:
            pass
        else:
            return
        cluster.restart(name, keep)
        [at] = cluster.commit(b"second")
        cluster.converge()
        assert cluster.lead().commands[at - 1] == b"second"
        assert len({member.status.cluster for member in cluster.members.values()}) == 1
    pytest.fail("it never ends")


def blank(clock: Clock) -> Driven:
    """Return a wiped member. Its disk is of the second generation, but the cluster counts the first one."""
    driven = Driven(clock, config_of("n1", NAMES[:3]), generation=1)
    driven.up()
    driven.step()
    driven.step()
    return driven


def test_wiped_disk_neither_votes_nor_campaigns(clock: Clock) -> None:
    driven = blank(clock)
    for term in (2, 3):
        for pre in (True, False):
            reply = driven.request_vote("n2", term, LogIndex(9, 9), pre=pre)
            assert reply is None or not reply.granted
    assert of_kind(driven.time_out(), RequestVote) == []
    assert driven.raft.role == "follower"


def test_wiped_disk_votes_only_after_applying_its_join(clock: Clock) -> None:
    driven = blank(clock)
    driven.hear("n2", *Snapshot(entries_of([2, 2])).chunks(2))
    driven.step()
    driven.up()
    driven.step()
    join = RaftEntry(encode_join(JoinEntry("n1", disk_id("n1", 1))), 4, 2)
    reply = driven.append(2, LogIndex(3, 2), [join], commit=3)
    assert (reply.matched, reply.index, reply.claim) == (True, 4, DiskClaim(disk_id("n1", 1)))
    clear_leader(driven)
    vote = driven.request_vote("n3", 3, LogIndex(4, 2))
    assert vote is not None
    assert not vote.granted
    reply = driven.append(4, LogIndex(4, 2), commit=4)
    driven.step()
    claim = DiskClaim(disk_id("n1", 1), LogIndex(4, 2))
    assert driven.node.claim == claim
    clear_leader(driven)
    vote = driven.request_vote("n3", 5, LogIndex(4, 2))
    assert vote == RequestVoteReply(5, True, claim, False)
    assert driven.reopened("none").node.claim == claim


UNCOUNTED = {
    "another disk": claim_of("n2", 7),
    "a disk that has not applied its join": DiskClaim(disk_id("n2")),
    "a disk of another join": claim_of("n2", joined=LogIndex(5, 2)),
}


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_messages_of_uncounted_disk_do_not_count(clock: Clock, kind: str) -> None:
    """This holds for its support, its vote, its acknowledgement and its signs of activity."""
    claim = UNCOUNTED[kind]
    driven = member(clock)
    driven.time_out()
    driven.grant("n2", 2, pre=True, claim=claim)
    assert driven.raft.term == 1
    driven.grant("n3", 2, pre=True)
    driven.grant("n2", 2, pre=False, claim=claim)
    assert driven.raft.role == "candidate"
    driven.grant("n3", 2, pre=False)
    assert driven.raft.role == "leader"
    driven.acknowledge("n2", 2, claim=claim)
    driven.step()
    assert driven.status.committed == 1
    for _ in range(8):
        clock.advance(0.1)
        driven.acknowledge("n2", 2, claim=claim)
    assert driven.raft.role == "follower"


def test_candidate_on_replaced_disk_gets_no_reply(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [RaftEntry(encode_join(JoinEntry("n3", disk_id("n3", 1))), 2, 2)], commit=1)
    clear_leader(driven)
    assert driven.request_vote("n3", 9, LogIndex(9, 9)) is None
    assert driven.raft.term == 2
    reply = driven.request_vote("n3", 9, LogIndex(9, 9), claim=claim_of("n3", 1, LogIndex(2, 2)))
    assert reply is not None
    assert reply.granted


def test_uncommitted_join_is_committed_once_joined_disk_claims_to_have_applied_it(clock: Clock) -> None:
    """A disk that claims to have applied the join proves that the join is committed. The former disk no
    longer counts.
    """
    driven = member(clock)
    driven.append(2, INITIAL, [RaftEntry(encode_join(JoinEntry("n3", disk_id("n3", 1))), 2, 2)], commit=1)
    driven.wire.drop("n3")
    driven.up("n3", claims={"n3": DiskClaim(disk_id("n3", 1))})
    driven.lead()
    driven.acknowledge("n3", 3, claim=DiskClaim(disk_id("n3", 1)))
    driven.step()
    assert driven.status.committed == 1
    driven.acknowledge("n3", 3, claim=claim_of("n3", 1, LogIndex(2, 2)))
    driven.step()
    assert driven.status.committed == 3


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_blank_disk_is_admitted_only_with_snapshot_that_includes_its_join(
    clock: Clock, has_snapshot: bool
) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [RaftEntry(encode_join(JoinEntry("n3", disk_id("n3", 1))), 2, 2)], commit=2)
    if has_snapshot:
        clock.advance(driven.config.snapshot_ms / 1000)
        while driven.status.snapshot < 2:
            driven.step()
    driven.wire.drop("n3")
    driven.up("n3", cluster=NO_ID, epoch=0, claims={"n3": DiskClaim(disk_id("n3", 1))})
    offered = [sent for sent in driven.step() + driven.step() if isinstance(sent[1], Admit)]
    assert bool(offered) == has_snapshot


def test_truncated_join_no_longer_counts(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [RaftEntry(encode_join(JoinEntry("n3", disk_id("n3", 1))), 2, 2)], commit=1)
    driven.append(3, INITIAL, entries_of([3]), commit=1, peer="n3")
    clear_leader(driven)
    reply = driven.request_vote("n3", 4, LogIndex(2, 3))
    assert reply is not None
    assert reply.granted


def test_duplicate_join_keeps_index_of_first_one(clock: Clock) -> None:
    driven = member(clock)
    join = encode_join(JoinEntry("n3", disk_id("n3", 1)))
    driven.append(2, INITIAL, [RaftEntry(join, 2, 2), RaftEntry(join, 3, 2)], commit=1)
    driven.wire.drop("n3")
    driven.up("n3", claims={"n3": claim_of("n3", 1, LogIndex(2, 2))})
    driven.lead()
    driven.acknowledge("n3", 4, claim=claim_of("n3", 1, LogIndex(2, 2)))
    driven.step()
    assert driven.status.committed == 4
    assert driven.node.state.disks["n3"] == claim_of("n3", 1, LogIndex(2, 2))


def test_wiped_disk_is_admitted_and_then_counts_towards_majority(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"before")
    cluster.converge()
    leader = cluster.lead()
    cluster.wipe(leader.name)
    cluster.run(lambda: cluster.members[leader.name].raft.is_counted_here)
    cluster.converge()
    other = next(name for name in cluster.names if name != cluster.lead().name and name != leader.name)
    if cluster.lead().name != leader.name:
        cluster.kill(other)
    cluster.commit(b"after", via=leader.name)
    assert cluster.members[leader.name].commands == [b"before", b"after"]


def test_join_needs_majority_without_joining_disk(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"before")
    cluster.converge()
    leader = cluster.lead()
    wiped, third = (name for name in cluster.names if name != leader.name)
    disk = cluster.kill(third)
    cluster.wipe(wiped)
    [future] = leader.propose(b"more")
    cluster.idle(3)
    assert not cluster.members[wiped].raft.is_counted_here
    assert not future.done()
    cluster.start(third, disk.after_power_cut("none"))
    cluster.run(lambda: cluster.members[wiped].raft.is_counted_here)
    cluster.run(future.done)
    cluster.converge()


@pytest.mark.parametrize("keep", AFTER)
def test_joined_disk_counts_after_all_nodes_lose_power_and_one_stays_down(
    clock: Clock, keep: Keep | None
) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"before")
    cluster.wipe("n3")
    cluster.run(lambda: cluster.members["n3"].raft.is_counted_here)
    cluster.commit(b"after")
    for name in cluster.names:
        cluster.kill(name)
    for name in ("n2", "n3"):
        cluster.start(name, cluster.disks[name].after_power_cut("all" if keep is None else keep))
    cluster.commit(b"with two")
    cluster.converge()
    assert cluster.lead().commands == [b"before", b"after", b"with two"]


def test_former_disk_of_member_is_admitted_again(clock: Clock) -> None:
    """The disk does not count before its admission. It keeps its data."""
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    cluster.converge()
    old = cluster.kill("n3")
    cluster.wipe("n3")
    cluster.run(lambda: cluster.members["n3"].raft.is_counted_here)
    cluster.commit(b"two")
    cluster.kill("n3")
    back = cluster.start("n3", old.after_power_cut("all"))
    assert back.node.claim == claim_of("n3")
    cluster.run(lambda: back.node.claim.joined.index > 1 and back.raft.is_counted_here)
    cluster.commit(b"three")
    cluster.converge()
    assert back.commands == [b"one", b"two", b"three"]


def test_alternating_disks_of_one_member_are_admitted_each_time(clock: Clock) -> None:
    """The same disk is admitted as often as it returns, also under one leader."""
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    cluster.converge()
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    disks = [cluster.kill(name)]
    cluster.wipe(name)
    for turn in range(4):
        cluster.run(lambda: cluster.members[name].raft.is_counted_here)
        disks.append(cluster.kill(name))
        cluster.start(name, disks[turn].after_power_cut("all"))
    assert cluster.lead() is leader


def test_messages_of_another_cluster_are_ignored(clock: Clock) -> None:
    driven = member(clock)
    for peer in ("n2", "n3"):
        driven.wire.drop(peer)
    driven.up(cluster=b"another cluster!")
    driven.step()
    driven.hear(
        "n2",
        AppendEntries(9, INITIAL, 1, 0, 0, entries_of([9])),
        RequestVote(9, LogIndex(9, 9), claim_of("n2"), False),
    )
    assert (driven.raft.term, driven.terms()) == (1, [])
    driven.clock.advance(1)
    driven.step()
    driven.grant("n2", 2, pre=True)
    assert (driven.raft.term, driven.raft.role) == (1, "follower")


def test_leader_sends_no_entries_to_peer_of_another_cluster(clock: Clock) -> None:
    driven = member(clock, 5)
    driven.lead()
    driven.wire.drop("n5")
    driven.up("n5", cluster=b"another cluster!")
    driven.step()
    driven.propose(b"secret")
    clock.advance(0.1)
    sent = driven.step() + driven.step()
    assert of_kind(sent, AppendEntries, "n2")
    assert of_kind(sent, AppendEntries, "n5") == []


@pytest.mark.parametrize("epoch", [0, 2])
def test_node_leaves_its_epoch_for_later_one_only_after_meeting_majority(clock: Clock, epoch: int) -> None:
    """A peer of another epoch is rejected. A node that meets a majority of a higher epoch leaves its own."""
    driven = member(clock)
    driven.wire.drop("n2")
    driven.up("n2", epoch=epoch)
    driven.step()
    driven.hear("n2", AppendEntries(9, INITIAL, 1, 0, 0, entries_of([9])))
    assert (driven.raft.term, driven.terms()) == (1, [])
    driven.wire.drop("n3")
    driven.up("n3", epoch=epoch)
    driven.step()
    asked = of_kind(driven.step(), FetchState)
    assert len(asked) == (epoch > 1), "it goes on with a state of theirs, and with nothing of its own"


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(72)])
@pytest.mark.parametrize("is_blank", [True, False])
def test_malformed_first_snapshot_is_rejected(clock: Clock, content: bytes, is_blank: bool) -> None:
    driven = Driven(clock, config_of("n1", NAMES[:3]))
    if not is_blank:
        driven.adopt()
    driven.up("n2", cluster=CLUSTER)
    driven.hear("n2", Admit(content))
    assert driven.status.cluster == ("" if is_blank else CLUSTER.hex())


def test_first_snapshot_without_own_disk_is_rejected(clock: Clock) -> None:
    driven = Driven(clock, config_of("n1", NAMES[:3]))
    driven.up("n2")
    others = {"n1": disk_id("n1", 5), "n2": disk_id("n2"), "n3": disk_id("n3")}
    driven.hear("n2", Admit(encode_state(initial_state(CLUSTER, 1, others))))
    assert driven.status.cluster == ""


def test_member_does_not_change_clusters(clock: Clock) -> None:
    driven = member(clock)
    disks = {name: disk_id(name) for name in NAMES[:3]}
    driven.hear("n2", Admit(encode_state(initial_state(b"another cluster!", 1, disks))))
    assert driven.status.cluster == CLUSTER.hex()


# --- Replicas that differ --------------------------------------------------------------------------------


def diverged(clock: Clock) -> tuple[Driven, AppendEntries]:
    """Return a node that applied an entry, and an append of a leader that applied another entry at that
    index.
    """
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2]), commit=2)
    driven.step()
    return driven, AppendEntries(3, LogIndex(2, 2), 2, 2, driven.node.state.chain ^ 1, ())


def test_node_with_state_diverged_from_leader_does_not_follow_it(clock: Clock) -> None:
    driven, append = diverged(clock)
    assert driven.hear("n3", append) == []
    assert driven.raft.term == 2
    clear_leader(driven)
    reply = driven.request_vote("n2", 4, LogIndex(2, 2), pre=True)
    assert reply is not None
    assert reply.granted, "if it is the leader that differs, another one must be possible"


def test_node_with_state_diverged_from_every_leader_raises_diverged(clock: Clock) -> None:
    driven, append = diverged(clock)
    with pytest.raises(Diverged, match="applied state differs"):
        for _ in range(1000):
            driven.hear("n3", append)
            clock.advance(0.05)


def test_node_with_state_equal_to_next_leader_continues(clock: Clock) -> None:
    driven, append = diverged(clock)
    for term in range(4, 12, 2):
        sent = driven.hear("n3", append._replace(term=term))
        assert not any(isinstance(message, AppendEntriesReply) for message in sent)
        clock.advance(0.3)
        agreeing = append._replace(term=term + 1, chain=driven.node.state.chain)
        assert only(driven.hear("n2", agreeing), AppendEntriesReply).matched
        clock.advance(5)
