"""Raft membership changes: lists in the log, learners, removal and joining, without threads.

Sections are those of Ongaro's dissertation of 2014. Rule n is of docs/raft.md.
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from disks import Keep, PowerCut
from paper_members import AFTER, Snapshot, clear_leader, commit_of, member
from raft_bench import (
    Clock,
    Driven,
    Lockstep,
    claim_of,
    config_of,
    disk_id,
    entries_of,
    of_kind,
)

from rt.errors import ClusterMismatch
from sequencer.raft.core.member_changes import PROMOTE_ENTRIES_MAX
from sequencer.raft.model.cluster_state import INITIAL
from sequencer.raft.model.entry_codec import NO_OP, JoinEntry, decode_members, encode_join, encode_members
from sequencer.raft.model.members import (
    AddLearner,
    MemberChange,
    MemberChangeNotReady,
    MemberChangeRefused,
    MemberRemoved,
    Members,
    PromoteLearner,
    RaftMember,
    RemoveMember,
    changed,
)
from sequencer.raft.model.messages import (
    AppendEntries,
    DiskClaim,
    LogIndex,
    MemberList,
    Message,
    RaftEntry,
    RequestVote,
    TimeoutNow,
)

THREE = {name: RaftMember(f"{name}:1") for name in ("n1", "n2", "n3")}
WITH_LEARNER = {**THREE, "n4": RaftMember("n4:1", votes=False)}
FOUR = {**THREE, "n4": RaftMember("n4:1")}
N4_JOINS = encode_join(JoinEntry("n4", disk_id("n4")))


def entry(content: bytes, index: int, term: int = 2) -> RaftEntry:
    return RaftEntry(content, index, term)


def list_entry(members: Members, index: int, term: int = 2) -> RaftEntry:
    return entry(encode_members(members), index, term)


def in_force(driven: Driven) -> Members:
    return driven.node.membership.members


def ask(driven: Driven, change: MemberChange) -> Future[None]:
    done: Future[None] = Future()
    driven.node._calls.append(lambda: driven.node.change_members(change, done))
    driven.step()
    return done


def refusal(driven: Driven, change: MemberChange) -> str:
    """Return why a change is rejected at once, and check that nothing was appended."""
    last = driven.log.last
    error = ask(driven, change).exception(0)
    assert isinstance(error, MemberChangeRefused)
    assert driven.log.last == last
    return error.what


def acknowledge_all(driven: Driven, *peers: str) -> None:
    """Let the peers acknowledge the leader's whole log. Then the leader commits and applies what it may."""
    for peer in peers:
        driven.acknowledge(peer, driven.log.last.index)
    driven.step()


def leader(clock: Clock, members: int = 3) -> Driven:
    """Return a leader that has committed an entry of its own term."""
    driven = member(clock, members)
    driven.lead()
    commit_of(driven, driven.log.last.index)
    driven.step()
    return driven


def leader_with_learner(clock: Clock) -> Driven:
    """Return the leader of three voters and the learner n4. The disk of n4 counts, and has all entries."""
    driven = leader(clock)
    done = ask(driven, AddLearner("n4", "n4:1"))
    acknowledge_all(driven, "n2")
    acknowledge_all(driven, "n2")
    done.result(0)
    driven.up("n4", claims={"n4": DiskClaim(disk_id("n4"))})
    driven.step()
    driven.step()
    acknowledge_all(driven, "n2")
    driven.acknowledge("n4", driven.log.last.index, claim=learner_claim(driven))
    assert driven.raft.peer_disks.is_counted("n4")
    return driven


def learner_claim(driven: Driven) -> DiskClaim:
    return driven.raft.voter_disks.disk_of("n4")


# --- A list is in force from its append: section 4.1 -----------------------------------------------------


@pytest.mark.parametrize("keep", AFTER)
def test_member_list_takes_effect_on_append_and_is_kept_after_restart(
    clock: Clock, keep: Keep | None
) -> None:
    driven = member(clock)
    assert in_force(driven) == THREE
    driven.append(2, INITIAL, [list_entry(WITH_LEARNER, 2)])
    assert (in_force(driven), driven.status.committed) == (WITH_LEARNER, 1)
    assert in_force(driven.reopened(keep)) == WITH_LEARNER


@pytest.mark.parametrize("keep", AFTER)
def test_truncated_member_list_is_rolled_back(clock: Clock, keep: Keep | None) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [list_entry(WITH_LEARNER, 2), list_entry(FOUR, 3)])
    driven.append(3, LogIndex(2, 2), [entry(NO_OP, 3, 3)], peer="n3")
    assert in_force(driven) == WITH_LEARNER
    driven.append(4, INITIAL, [entry(NO_OP, 2, 4)])
    assert in_force(driven) == in_force(driven.reopened(keep)) == THREE


def test_snapshot_contains_member_list(clock: Clock) -> None:
    driven = member(clock)
    snapshot = Snapshot((list_entry(WITH_LEARNER, 2), entry(N4_JOINS, 3), list_entry(FOUR, 4)))
    driven.hear("n2", *snapshot.chunks(2))
    driven.step()
    assert driven.status.applied == 4
    assert in_force(driven) == in_force(driven.reopened("none")) == FOUR


def test_member_list_in_log_takes_precedence_over_older_snapshot(clock: Clock) -> None:
    driven = member(clock, snapshot_ms=1)
    driven.append(2, INITIAL, [list_entry(WITH_LEARNER, 2), entry(N4_JOINS, 3)], commit=3)
    clock.advance(1)
    driven.step()
    driven.step()
    assert driven.status.snapshot == 3
    driven.append(2, LogIndex(3, 2), [list_entry(FOUR, 4)], commit=3)
    assert in_force(driven.reopened("none")) == FOUR


def test_committed_member_list_is_reported_at_start_and_on_each_change(clock: Clock) -> None:
    seen: list[Members] = []
    driven = member(clock)
    driven.node.membership._on_members = seen.append
    driven.append(2, INITIAL, [list_entry(WITH_LEARNER, 2)])
    assert seen == []
    driven.append(2, LogIndex(2, 2), commit=2)
    driven.step()
    assert seen == [WITH_LEARNER]
    again = driven.reopened()
    again.node.membership._on_members = seen.append
    again.append(2, LogIndex(2, 2), commit=2)
    again.step()
    assert seen == [WITH_LEARNER] * 2


# --- Changes that a leader rejects -----------------------------------------------------------------------


def test_follower_rejects_member_change(clock: Clock) -> None:
    driven = member(clock)
    assert refusal(driven, RemoveMember("n3")) == "this node does not lead"


def test_new_leader_rejects_member_change_until_it_commits_entry_of_its_term(clock: Clock) -> None:
    """The Raft bug of 2015: if the lists of two leaders differ by two members, they commit different
    entries.
    """
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    driven.step()
    driven.lead()
    why = "the leader has not committed an entry of its own term yet"
    assert refusal(driven, RemoveMember("n3")) == why
    commit_of(driven, driven.log.last.index)
    assert not ask(driven, RemoveMember("n3")).done()


def test_second_member_change_is_rejected_while_one_is_in_flight(clock: Clock) -> None:
    driven = leader(clock)
    first = ask(driven, RemoveMember("n3"))
    why = "another change of the members is in flight"
    assert refusal(driven, RemoveMember("n2")) == why
    acknowledge_all(driven, "n2")
    assert set(in_force(driven)) == {"n1", "n2"}
    assert refusal(driven, AddLearner("n4", "n4:1")) == why
    acknowledge_all(driven, "n2")
    first.result(0)
    assert not ask(driven, AddLearner("n4", "n4:1")).done()


def test_new_leader_rejects_member_change_until_inherited_list_is_committed(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [list_entry(WITH_LEARNER, 2)])
    clear_leader(driven)
    driven.lead()
    assert refusal(driven, RemoveMember("n3")) == "another change of the members is in flight"
    acknowledge_all(driven, "n2")
    assert not ask(driven, RemoveMember("n3")).done()


def test_leader_rejects_its_own_removal(clock: Clock) -> None:
    driven = leader(clock)
    error = ask(driven, RemoveMember("n1")).exception(0)
    assert isinstance(error, MemberChangeNotReady)
    assert error.hint == "Transfer the leadership first, then ask the new leader."


def test_removal_is_rejected_if_too_few_remaining_voters_are_connected(clock: Clock) -> None:
    driven = leader(clock)
    driven.wire.drop("n3")
    driven.step()
    why = "too few voters of the new list are connected, with a disk that counts"
    assert refusal(driven, RemoveMember("n2")) == why
    assert not ask(driven, RemoveMember("n3")).done()


def test_removal_is_rejected_if_connected_voter_has_uncounted_disk(clock: Clock) -> None:
    driven = leader(clock)
    driven.wire.drop("n3")
    driven.step()
    driven.up("n3", claims={"n3": claim_of("n3", 1, LogIndex(0, 0))})
    driven.step()
    acknowledge_all(driven, "n2")
    assert "too few voters" in refusal(driven, RemoveMember("n2"))


def test_member_list_is_appended_only_after_majority_answers_request(clock: Clock) -> None:
    """A disk that was lost a moment before does not answer, although its connection may still look open."""
    driven = leader(clock, 5)
    acknowledge_all(driven, "n2", "n3", "n4", "n5")
    done = ask(driven, RemoveMember("n5"))
    before = driven.log.last
    acknowledge_all(driven, "n5")
    driven.acknowledge("n2", before.index - 1)
    assert driven.log.last == before
    acknowledge_all(driven, "n2")
    acknowledge_all(driven, "n3")
    assert decode_members(driven.log.entry(before.index + 1).content) == changed(
        {name: RaftMember(f"{name}:1") for name in ("n1", "n2", "n3", "n4", "n5")}, RemoveMember("n5")
    )
    assert not done.done()


def test_unconfirmed_member_change_fails_with_not_ready(clock: Clock) -> None:
    driven = leader(clock)
    done = ask(driven, RemoveMember("n3"))
    for _ in range(10):
        clock.advance(0.1)
        driven.acknowledge("n3", driven.log.last.index)
    assert isinstance(done.exception(0), MemberChangeNotReady)
    assert in_force(driven) == THREE


def test_member_change_fails_with_not_ready_if_its_list_is_truncated(clock: Clock) -> None:
    driven = leader(clock)
    done, before = ask(driven, RemoveMember("n3")), driven.log.last
    acknowledge_all(driven, "n2")
    assert not done.done()
    term = driven.raft.term + 1
    driven.append(term, before, [entry(NO_OP, before.index + 1, term)])
    assert isinstance(done.exception(0), MemberChangeNotReady)
    assert in_force(driven) == THREE


def test_member_change_succeeds_if_another_leader_commits_it(clock: Clock) -> None:
    driven = leader(clock)
    done = ask(driven, RemoveMember("n3"))
    acknowledge_all(driven, "n2")
    last, term = driven.log.last, driven.raft.term + 1
    driven.append(term, last, [entry(NO_OP, last.index + 1, term)], commit=last.index + 1)
    driven.step()
    done.result(0)


# --- Learners: section 4.2.1 -----------------------------------------------------------------------------


def test_learner_receives_entries_but_does_not_count_for_commit(clock: Clock) -> None:
    driven = leader_with_learner(clock)
    driven.propose(b"x")
    driven.step()
    driven.step()
    last = driven.log.last.index
    driven.acknowledge("n4", last, claim=learner_claim(driven))
    driven.step()
    assert driven.raft.leader_role.match_index("n4") == last
    assert driven.status.committed < last
    acknowledge_all(driven, "n2")
    assert driven.status.committed == last


def test_learner_replies_do_not_prevent_leader_from_stepping_down(clock: Clock) -> None:
    driven = leader_with_learner(clock)
    for _ in range(10):
        clock.advance(0.1)
        driven.acknowledge("n4", driven.log.last.index, claim=learner_claim(driven))
    assert driven.raft.role == "follower"


def test_learner_is_not_asked_for_vote_and_its_votes_do_not_count(clock: Clock) -> None:
    driven = leader_with_learner(clock)
    clock.advance(2.0)
    driven.step()
    sent = driven.time_out()
    assert {peer for peer, _ in sent if isinstance(_, RequestVote)} == {"n2", "n3"}
    term = driven.raft.term + 1
    driven.grant("n4", term, pre=True, claim=learner_claim(driven))
    assert driven.raft.role == "follower"
    driven.grant("n2", term, pre=True)
    driven.grant("n4", term, pre=False, claim=learner_claim(driven))
    assert driven.raft.role == "candidate"
    driven.grant("n3", term, pre=False)
    assert driven.raft.role == "leader"


def learner(clock: Clock) -> Driven:
    """The node n4, which has joined as a learner."""
    driven = Driven(clock, config_of("n4", ["n1", "n4"]))
    driven.up("n1")
    driven.step()
    driven.hear("n1", *Snapshot((list_entry(WITH_LEARNER, 2), entry(N4_JOINS, 3))).chunks(2))
    driven.step()
    driven.up("n1", "n2", "n3")
    driven.step()
    assert driven.raft.is_counted_here
    return driven


def test_learner_does_not_campaign(clock: Clock) -> None:
    driven = learner(clock)
    assert of_kind(driven.time_out(), RequestVote) == []
    driven.append(2, LogIndex(3, 2), commit=3, peer="n1")
    assert of_kind(driven.hear_all("n1", TimeoutNow(2)) + driven.step(), RequestVote) == []
    assert driven.raft.role == "follower"


def test_learner_votes_for_candidate_with_longer_log(clock: Clock) -> None:
    """Section 4.2.1 has no rule against it. Without that vote, possibly no node could become leader and
    inform the learner.
    """
    driven = learner(clock)
    clear_leader(driven)
    vote = driven.request_vote("n2", 3, LogIndex(4, 2))
    assert vote is not None
    assert vote.granted
    assert (driven.log.term, driven.log.voted_for) == (3, "n2")


def test_promoted_learner_counts_from_append_of_member_list(clock: Clock) -> None:
    driven = leader_with_learner(clock)
    done = ask(driven, PromoteLearner("n4"))
    acknowledge_all(driven, "n2")
    driven.acknowledge("n4", driven.log.last.index, claim=learner_claim(driven))
    assert in_force(driven) == FOUR
    last = driven.log.last.index
    acknowledge_all(driven, "n2")
    assert driven.status.committed < last, "two of four are no majority"
    driven.acknowledge("n4", last, claim=learner_claim(driven))
    driven.step()
    assert driven.status.committed == last
    done.result(0)


def test_promotion_is_rejected_if_learner_lags_or_is_disconnected(clock: Clock) -> None:
    driven = leader_with_learner(clock)
    why = "the learner does not match the leader's log closely"
    entries = PROMOTE_ENTRIES_MAX + 1
    for index in range(driven.log.last.index + 1, driven.log.last.index + 1 + entries):
        driven.raft._SyncObj__raftLog.add(NO_OP, index, driven.raft.term)
    acknowledge_all(driven, "n2", "n3")
    assert refusal(driven, PromoteLearner("n4")) == why
    driven.acknowledge("n4", driven.log.last.index, claim=learner_claim(driven))
    driven.wire.drop("n4")
    driven.step()
    assert refusal(driven, PromoteLearner("n4")) == why


def test_leadership_is_not_transferred_to_learner(clock: Clock) -> None:
    driven = leader_with_learner(clock)
    driven.node.transfers.start(10.0, Future())
    assert of_kind(driven.step() + driven.step(), TimeoutNow, "n4") == []


# --- Removed nodes: section 4.2.3 ------------------------------------------------------------------------


def test_node_absent_from_member_list_does_not_campaign(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [list_entry(changed(THREE, RemoveMember("n1")), 2)])
    assert of_kind(driven.time_out(), RequestVote) == []


def test_removed_node_learns_of_its_removal_and_stops(clock: Clock) -> None:
    cluster = cluster_of(clock, 3)
    cluster.remove("n3")
    cluster.run(lambda: "n3" in cluster.removed, seconds=1.0)
    assert not cluster.removed["n3"].is_listed
    assert "add it to the cluster again" in str(cluster.removed["n3"])
    cluster.commit(b"without it")


def test_offline_removed_node_learns_of_removal_at_each_start(clock: Clock) -> None:
    cluster = cluster_of(clock, 3)
    disk = cluster.kill("n1")
    cluster.remove("n1")
    cluster.idle(10.0)
    for _ in range(2):
        before = cluster.lead().raft.term
        cluster.start("n1", disk.after_power_cut("all"))
        cluster.run(lambda: "n1" in cluster.removed, seconds=5.0)
        disk = cluster.disks["n1"]
        del cluster.removed["n1"]
        assert cluster.lead().raft.term == before, "it disrupts nobody"


def test_node_with_uncommitted_removal_remains_member(clock: Clock) -> None:
    cluster = cluster_of(clock, 3)
    leader = cluster.lead()
    away, other = (name for name in cluster.names if name != leader.name)
    appended = [False]

    def drop(sender: str, _to: str, message: Message) -> bool:
        is_list = isinstance(message, AppendEntries) and any(map(has_list, message.entries))
        appended[0] |= is_list
        return is_list and sender == leader.name

    cluster.drop_message = drop
    done = cluster.request(RemoveMember(away))
    cluster.run(lambda: appended[0])
    cluster.kill(leader.name)
    cluster.drop_message = lambda _sender, _to, _message: False
    cluster.commit(b"on", via=away)
    cluster.start(leader.name, cluster.disks[leader.name].after_power_cut("all"))
    cluster.converge()
    assert all(set(one.node.membership.members) == set(cluster.names) for one in cluster.members.values())
    assert not done.done()
    assert other in cluster.members


def has_list(one: RaftEntry) -> bool:
    return decode_members(one.content) is not None


def test_readded_disk_joins_again_and_restart_from_older_snapshot_keeps_join(clock: Clock) -> None:
    cluster = cluster_of(clock, 3, snapshot_ms=1_000_000)
    cluster.commit(b"before", via="n3")
    cluster.remove("n3")
    cluster.run(lambda: "n3" in cluster.removed)
    cluster.change(AddLearner("n3", "n3:1"))
    for _ in range(3):
        cluster.start("n3", cluster.disks["n3"].after_power_cut("all"))
        cluster.removed.clear()
        cluster.run(lambda: "n3" in cluster.removed or is_joined(cluster, "n3"))
        if "n3" in cluster.members:
            break
        assert cluster.removed["n3"].is_listed
    joined = cluster.members["n3"].node.claim.joined
    assert joined > INITIAL
    cluster.restart("n3")
    assert cluster.members["n3"].status.snapshot < joined.index
    assert cluster.members["n3"].node.claim.joined == joined
    cluster.change(PromoteLearner("n3"))
    cluster.commit(b"after", via="n3")
    cluster.converge()


def is_joined(cluster: Lockstep, name: str) -> bool:
    disks = cluster.lead().raft.voter_disks
    return name in cluster.members and cluster.members[name].node.claim == disks.disk_of(name)


def test_pending_command_of_removed_and_readded_node_is_applied_once(clock: Clock) -> None:
    """The cluster has forgotten what that run proposed, so the node forwards nothing until it has joined
    again.
    """
    cluster = cluster_of(clock, 3)
    leader = cluster.lead().name
    name = next(one for one in cluster.names if one != leader)
    cluster.members[name].propose(b"once")
    cluster.run(lambda: b"once" in cluster.members[leader].commands)
    cluster.isolate(name)
    cluster.remove(name)
    cluster.idle(10.0)
    cluster.change(AddLearner(name, f"{name}:1"))
    cluster.heal()
    cluster.run(lambda: name in cluster.removed)
    cluster.start(name, cluster.disks[name].after_power_cut("all"))
    cluster.commit(b"next", via=name)
    assert cluster.members[leader].commands.count(b"once") == 1


def test_old_or_uncommitted_member_list_of_peer_does_not_remove_node(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [list_entry(WITH_LEARNER, 2), list_entry(FOUR, 3)])
    without = MemberList(2, True, encode_members(changed(THREE, RemoveMember("n1"))))
    driven.hear("n2", without)
    clock.advance(60.0)
    driven.step()
    driven.hear("n2", without._replace(index=9, is_committed=False))
    clock.advance(60.0)
    driven.step()
    assert "n1" in in_force(driven)


def test_committed_removal_at_lower_index_than_uncommitted_list_takes_effect(clock: Clock) -> None:
    """A peer sent a list that was never committed. The committed list has a lower index."""
    driven = member(clock)
    driven.hear("n2", MemberList(9, False, encode_members(FOUR)))
    driven.hear("n2", MemberList(8, True, encode_members(changed(THREE, RemoveMember("n1")))))
    clock.advance(5.0)
    with pytest.raises(MemberRemoved):
        driven.step()


def test_uncommitted_member_list_of_peer_supplies_names_but_no_votes(clock: Clock) -> None:
    driven = member(clock)
    driven.hear("n2", MemberList(5, False, encode_members(FOUR)))
    assert set(driven.wire.listed) == set(FOUR)
    assert in_force(driven) == THREE
    driven.hear("n2", MemberList(6, False, b"no list"))
    assert set(driven.wire.listed) == set(FOUR)


# --- Whole clusters --------------------------------------------------------------------------------------


def cluster_of(clock: Clock, members: int, **settings: int) -> Lockstep:
    """Return a cluster that has committed something."""
    names = [f"n{at}" for at in range(1, members + 1)]
    cluster = Lockstep(clock, names, **{"snapshot_ms": 100, **settings})
    cluster.commit(b"made")
    return cluster


def test_cluster_grows_from_one_to_five_and_shrinks_to_three(clock: Clock) -> None:
    cluster = cluster_of(clock, 1)
    for name in ("n2", "n3", "n4", "n5"):
        cluster.spare(name)
        cluster.add(name)
        cluster.commit(name.encode(), via=name)
    cluster.converge()
    for name in ("n1", "n4"):
        cluster.remove(name)
        cluster.run(lambda name=name: name in cluster.removed)
        cluster.commit(b"without", via="n5")
    cluster.converge()
    assert {name: one.votes for name, one in cluster.lead().node.membership.members.items()} == {
        "n2": True,
        "n3": True,
        "n5": True,
    }
    assert [one.votes for one in cluster.lead().status.members] == [True] * 3


def test_new_node_joins_knowing_one_member_and_restarts_with_other_configured_names(clock: Clock) -> None:
    cluster = cluster_of(clock, 3)
    cluster.spare("n4", "n2")
    cluster.idle(2.0)
    assert cluster.members["n4"].status.role == "joining"
    cluster.add("n4")
    cluster.commit(b"x", via="n4")
    disk = cluster.kill("n4").after_power_cut("all")
    cluster.start("n4", disk, names=["n4", "elsewhere"], bootstrap=False)
    cluster.commit(b"y", via="n4")


def test_member_rejects_other_configured_names_before_first_member_list(clock: Clock) -> None:
    cluster = cluster_of(clock, 3)
    disk = cluster.kill("n3").after_power_cut("all")
    with pytest.raises(ClusterMismatch):
        cluster.start("n3", disk, names=["n1", "n2", "n3", "n4"], bootstrap=False)


def test_member_absent_during_changes_elects_leader_unknown_to_it(clock: Clock) -> None:
    """n4 has entries that n2 misses, and n3 knows n4 only from n2. Without that knowledge no node could
    become leader.
    """
    cluster = cluster_of(clock, 3)
    while cluster.lead().name != "n1":
        cluster.restart(cluster.lead().name)
        cluster.idle(1.0)
    away = cluster.kill("n3").after_power_cut("all")
    cluster.spare("n4")
    cluster.add("n4")
    cluster.converge()
    cluster.cut(("n1", "n2"))
    [_] = cluster.members["n1"].propose(b"for n4 only")
    cluster.run(lambda: cluster.members["n4"].log.last > cluster.members["n2"].log.last)
    cluster.kill("n1")
    cluster.start("n3", away)
    cluster.commit(b"without n1", via="n2")
    assert cluster.lead().name == "n4"


@pytest.mark.parametrize("name", ["n1", "n4"])
@pytest.mark.parametrize("keep", ["none", "some"])
def test_member_changes_survive_power_cut_of_one_node(clock: Clock, name: str, keep: Keep) -> None:
    """n1 leads or follows; n4 is added, promoted and removed."""
    for change in range(1, 400, 7):
        cluster = cluster_of(clock, 3)
        cluster.spare("n4")
        cluster.disks[name].cut_power_at(cluster.disks[name].changes + change)
        is_cut = False
        for step in (AddLearner("n4", "n4:1"), PromoteLearner("n4"), b"x", RemoveMember("n4"), b"y"):
            is_cut |= not done_in_spite_of_cuts(cluster, step, name, keep)
        cluster.converge()
        assert set(cluster.lead().node.membership.members) == set(THREE)
        if not is_cut:
            return
    pytest.fail("it never ends")


def done_in_spite_of_cuts(cluster: Lockstep, step: MemberChange | bytes, name: str, keep: Keep) -> bool:
    """Run the step despite power cuts, and return whether the power stayed on."""
    try:
        if isinstance(step, bytes):
            cluster.commit(step)
        elif isinstance(step, RemoveMember):
            cluster.remove(step.name)
        else:
            cluster.change(step)
    except PowerCut:
        cluster.restart(name, keep)
        done_in_spite_of_cuts(cluster, step, name, keep)
        return False
    except MemberChangeRefused:
        assert not isinstance(step, bytes)  # The change was done before the power cut.
    return True


def test_reset_keeps_member_list(clock: Clock) -> None:
    cluster = cluster_of(clock, 3)
    cluster.spare("n4")
    cluster.add("n4", is_voter=False)
    cluster.lead().node.reset(b"reset")
    cluster.run(lambda: all(one.status.epoch == 2 for one in cluster.members.values()))
    cluster.commit(b"after")
    assert cluster.lead().node.membership.members == WITH_LEARNER
    cluster.change(PromoteLearner("n4"))


def test_forced_epoch_keeps_member_list_and_needs_majority_of_voters(clock: Clock) -> None:
    cluster = cluster_of(clock, 3)
    cluster.spare("n4")
    cluster.add("n4", is_voter=False)
    cluster.converge()
    for name in ("n2", "n3"):
        cluster.kill(name)
    cluster.idle(1.0)
    survivor = cluster.members["n1"]
    why_not = survivor.node.force(b"forced")
    assert why_not is not None
    assert "a majority of the members" in why_not.what
    assert "does not vote" in str(cluster.members["n4"].node.force(b"forced"))
    cluster.wipe("n2")
    cluster.wipe("n4")
    cluster.idle(1.0)
    assert survivor.node.force(b"forced") is None
    cluster.run(lambda: cluster.members["n1"].status.epoch > 1)
    cluster.commit(b"after", via="n1")
    assert cluster.lead().node.membership.members == WITH_LEARNER
