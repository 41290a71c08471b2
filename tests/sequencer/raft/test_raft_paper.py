"""Elections, log replication and commit rules of the Raft paper on a single node and small clusters.

Sections are those of Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm", extended
version of 2014; "dissertation" is Ongaro's of the same year. Rule n is of docs/raft.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from disks import Keep, PowerCut
from hypothesis import given
from hypothesis import strategies as st
from paper_members import AFTER, NAMES, Snapshot, clear_leader, commit_of, member
from raft_bench import (
    CLUSTER,
    Clock,
    Driven,
    Lockstep,
    claim_of,
    config_of,
    entries_of,
    of_kind,
    only,
)

import rt
from rt.errors import Diverged
from sequencer.raft.core.follower import AppendMatched, AppendRejected, compare
from sequencer.raft.model.cluster_state import INITIAL
from sequencer.raft.model.entry_codec import (
    NO_OP,
)
from sequencer.raft.model.messages import (
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
)
from sequencer.raft.storage.log_entries import Entries

# --- Elections: sections 5.1, 5.2, 5.4.1 -----------------------------------------------------------------


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize(
    ("last", "granted"),
    [
        (LogIndex(9, 2), False),  # longer, of an older term
        (LogIndex(2, 3), False),  # shorter, of the same term
        (LogIndex(3, 3), True),
        (LogIndex(4, 3), True),
        (LogIndex(2, 4), True),  # shorter, of a newer term
    ],
)
def test_vote_is_granted_only_to_candidate_with_log_at_least_as_complete(
    clock: Clock, last: LogIndex, granted: bool, pre: bool
) -> None:
    """Section 5.4.1: the later last term wins, then the longer log."""
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([2, 3]))
    clear_leader(driven)
    reply = driven.request_vote("n3", 7, last, pre=pre)
    assert reply == RequestVoteReply(7 if granted or not pre else 3, granted, driven.node.claim, pre)
    assert (driven.log.term, driven.log.voted_for) == ((3, None) if pre else (7, "n3" if granted else None))


def test_node_votes_for_one_candidate_per_term(clock: Clock) -> None:
    """Section 5.2; the same candidate may ask again, as its answer may be lost."""
    driven = member(clock)
    asked = [("n2", True), ("n3", False), ("n2", True)]
    for peer, granted in asked:
        reply = driven.request_vote(peer, 5, INITIAL)
        assert reply is not None
        assert (reply.term, reply.granted) == (5, granted)


@pytest.mark.parametrize("keep", AFTER)
def test_vote_is_kept_after_restart(clock: Clock, keep: Keep | None) -> None:
    """Figure 2: currentTerm and votedFor are persistent."""
    driven = member(clock)
    driven.request_vote("n2", 5, INITIAL)
    driven = driven.reopened(keep)
    assert (driven.log.term, driven.log.voted_for) == (5, "n2")
    reply = driven.request_vote("n3", 5, INITIAL)
    assert reply is not None
    assert not reply.granted


@pytest.mark.parametrize("keep", AFTER)
def test_candidate_vote_for_itself_is_kept_after_restart(clock: Clock, keep: Keep | None) -> None:
    driven = member(clock)
    term = driven.stand()
    driven = driven.reopened(keep)
    assert (driven.log.term, driven.log.voted_for, driven.raft.role) == (term, "n1", "follower")
    reply = driven.request_vote("n2", term, INITIAL)
    assert reply is not None
    assert not reply.granted


def test_candidate_becomes_leader_with_votes_of_majority_of_distinct_voters(clock: Clock) -> None:
    """Section 5.2; each voter's vote counts once (B8 of PySyncObj)."""
    driven = member(clock, 5)
    term = driven.stand()
    for _ in range(4):
        driven.grant("n2", term, pre=False)
    assert driven.raft.role == "candidate"
    driven.grant("n4", term, pre=False)
    assert driven.raft.role == "leader"


def test_pre_vote_counts_once_per_voter(clock: Clock) -> None:
    driven = member(clock, 5)
    driven.time_out()
    for _ in range(4):
        driven.grant("n2", 2, pre=True)
    assert (driven.raft.role, driven.raft.term) == ("follower", 1)
    driven.grant("n3", 2, pre=True)
    assert (driven.raft.role, driven.raft.term) == ("candidate", 2)


def test_votes_of_another_term_do_not_count(clock: Clock) -> None:
    driven = member(clock)
    term = driven.stand()
    driven.grant("n2", term - 1, pre=False)
    driven.grant("n2", term + 1, pre=False)
    assert driven.raft.role == "candidate"


def test_candidate_follows_leader_of_its_term(clock: Clock) -> None:
    """Section 5.2."""
    driven = member(clock)
    term = driven.stand()
    assert driven.append(term, INITIAL).matched
    assert (driven.raft.role, driven.raft.leader, driven.log.voted_for) == ("follower", "n2", "n1")
    driven.grant("n3", term, pre=False)
    assert driven.raft.role == "follower"


LATER: dict[str, Message] = {
    "vote": RequestVoteReply(9, False, claim_of("n2"), False),
    "support": RequestVoteReply(9, False, claim_of("n2"), True),
    "acknowledgement": AppendEntriesReply(9, False, 1, 1, claim_of("n2")),
    "chunk": InstallSnapshotReply(9, LogIndex(3, 3), 0, 0, False, claim_of("n2")),
    "append": AppendEntries(9, INITIAL, 1, 0, 0, ()),
}


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("role", ["candidate", "leader"])
def test_candidate_or_leader_becomes_follower_on_message_of_later_term(
    clock: Clock, role: str, kind: str
) -> None:
    """Section 5.1."""
    driven = member(clock)
    if role == "leader":
        driven.lead()
    else:
        driven.stand()
    is_answer_to_leader = kind in {"acknowledgement", "chunk"}
    driven.hear("n2", LATER[kind])
    if role == "candidate" and is_answer_to_leader:
        return  # No peer sends this to a candidate, so any reaction is allowed.
    assert (driven.raft.role, driven.raft.term, driven.log.term) == ("follower", 9, 9)
    assert driven.log.voted_for is None


def test_stale_leader_is_sent_new_term_and_its_messages_are_ignored(clock: Clock) -> None:
    """Section 5.1."""
    driven = member(clock)
    driven.append(5, INITIAL, entries_of([5]))
    before = driven.contents()
    reply = driven.append(4, INITIAL, entries_of([4, 4]), commit=3, peer="n3")
    assert (reply.term, reply.matched) == (5, False)
    assert (driven.contents(), driven.status.committed, driven.raft.leader) == (before, 1, "n2")
    chunk = InstallSnapshot(4, LogIndex(9, 4), 3, bytes(32), 0, b"abc")
    assert driven.hear("n3", chunk) == []
    assert driven.raft.leader == "n2"


def test_deposed_leader_steps_down_on_reply_of_later_term(clock: Clock) -> None:
    """B11 of PySyncObj: a stale leader received no answer."""
    driven = member(clock)
    driven.lead()
    driven.hear("n2", AppendEntriesReply(9, False, 2, 1, claim_of("n2")))
    assert (driven.raft.role, driven.raft.leader, driven.raft.term) == ("follower", None, 9)


def test_second_leader_in_same_term_raises_diverged(clock: Clock) -> None:
    """Section 5.2, election safety: a node that sees a violation must not continue."""
    driven = member(clock)
    term = driven.lead()
    with pytest.raises(Diverged, match="two leaders"):
        driven.hear("n2", AppendEntries(term, INITIAL, 1, 0, 0, ()))


# --- Persist, then send: figure 2, rule 1 ----------------------------------------------------------------


def _vote(driven: Driven) -> None:
    driven.request_vote("n2", 5, INITIAL)


def _stand(driven: Driven) -> None:
    driven.stand()


def _append(driven: Driven) -> None:
    driven.append(2, INITIAL, entries_of([2, 2]))


def _overwrite(driven: Driven) -> None:
    driven.append(2, INITIAL, entries_of([2, 2]))
    driven.append(3, INITIAL, entries_of([3, 3, 3]), peer="n3")


def _install(driven: Driven) -> None:
    snapshot = Snapshot(entries_of([2, 2, 2]))
    driven.hear("n2", *snapshot.chunks(2))
    driven.step()
    driven.append(2, snapshot.place, commit=4)


def _lead(driven: Driven) -> None:
    driven.lead()
    driven.propose(b"command")
    driven.step()


def _is_kept(message: Message, peer: str, later: Driven) -> bool:
    """Return whether the disk after the power cut agrees with a message that was sent before the cut."""
    match message:
        case RequestVoteReply(term, True, _, False):
            return later.log.term > term or (later.log.term, later.log.voted_for) == (term, peer)
        case RequestVote(term, _, _, False):
            return later.log.term > term or (later.log.term, later.log.voted_for) == (term, "n1")
        case AppendEntriesReply(term, True, _, index, _):
            return later.log.term >= term and later.log.last.index >= index
        case InstallSnapshotReply(term, place, _, _, True, _):
            return later.log.term >= term and later.status.applied >= place.index
        case AppendEntries(term, _, _, _, _, entries):
            return later.log.term >= term and all(later.log.term_at(entry.index) for entry in entries)
    return True


@pytest.mark.parametrize("keep", ["none", "some"])
@pytest.mark.parametrize("act", [_vote, _stand, _append, _overwrite, _install, _lead])
def test_sent_messages_are_backed_by_disk_after_power_cut_at_any_write(
    clock: Clock, act: Callable[[Driven], None], keep: Keep
) -> None:
    """Figure 2: updated on stable storage before responding."""
    left = 0
    for change in range(1, 200):
        driven = member(clock)
        driven.disk.cut_power_at(driven.disk.changes + change)
        try:
            act(driven)
        except (PowerCut, AssertionError):
            assert driven.disk.is_off
        is_cut = driven.disk.is_off
        sent = list(driven.wire.sent)
        later = driven.reopened(keep, seed=change)
        replaced = max(
            [message.term for _, message in sent if isinstance(message, AppendEntriesReply)], default=0
        )
        for peer, message in sent:
            if isinstance(message, AppendEntriesReply) and message.term < replaced:
                continue  # A later leader replaced the entries of this one.
            assert _is_kept(message, peer, later), (change, message)
            left += 1
        if not is_cut:
            assert left
            return
    pytest.fail("it never ends")


def test_node_sends_no_message_after_failed_sync(clock: Clock) -> None:
    """Rule 1: a failed fsync is final."""
    driven = member(clock)
    driven.disk.fail("sync")
    with pytest.raises(rt.StorageFailed):
        driven.append(2, INITIAL, entries_of([2]))
    assert driven.wire.sent == []
    with pytest.raises(rt.StorageFailed):
        driven.step()
    assert driven.wire.sent == []


def test_entries_are_applied_only_after_sync(clock: Clock) -> None:
    """The effects of a state machine may be visible at once."""
    driven = member(clock)
    apply, synced = driven.machine.apply, []

    def watch(index: int, command: bytes) -> None:
        synced.append(driven.log.synced.index)
        apply(index, command)

    driven.machine.apply = watch  # type: ignore[method-assign]
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    assert synced == [3, 3]


def test_leader_with_failed_sync_commits_no_entry_and_stops_sending(clock: Clock) -> None:
    """Dissertation, section 10.2.1: the leader sends its entries while it syncs them itself."""
    driven = member(clock)
    term = driven.lead()
    for peer in driven.config.peers:
        driven.acknowledge(peer, driven.log.last.index)
    committed, last = driven.status.committed, driven.log.last
    [future] = driven.propose(b"x")
    driven.wire.sent.clear()
    driven.disk.fail("sync")
    with pytest.raises(rt.StorageFailed):
        driven.step()
    entries = [message.entries for _, message in driven.wire.sent if isinstance(message, AppendEntries)]
    assert [[entry.place for entry in sent] for sent in entries] == 2 * [[LogIndex(last.index + 1, term)]]
    assert (future.done(), driven.status.committed, driven.log.synced) == (False, committed, last)
    driven.wire.sent.clear()
    with pytest.raises(rt.StorageFailed):
        driven.acknowledge(driven.config.peers[0], last.index + 1)
    assert (driven.wire.sent, driven.status.committed) == ([], committed)


@pytest.mark.parametrize("keep", AFTER)
def test_unsynced_entry_of_leader_is_applied_at_most_once_after_restart(
    clock: Clock, keep: Keep | None
) -> None:
    """The leader's term and its vote for itself are on its disk before it leads, so it never leads that term
    again.
    """
    cluster = Lockstep(clock)
    leader = cluster.lead()
    cluster.commit(b"first")
    others = [name for name in cluster.names if name != leader.name]
    leader.propose(b"unsynced")
    leader.disk.fail("sync")
    with pytest.raises(rt.StorageFailed):
        leader.node.step()
    sent, term = leader.log.last, leader.raft.term
    assert sent > leader.log.synced
    cluster.restart(leader.name, keep)
    cluster.run(lambda: cluster.leader is not None and cluster.leader.raft.term > term)
    cluster.commit(b"second", via=others[0])
    cluster.converge()
    commands = cluster.members[leader.name].commands
    assert [command for command in commands if command != b"unsynced"] == [b"first", b"second"]
    assert commands.count(b"unsynced") <= 1


def test_leader_commits_no_entry_while_its_disk_is_full(clock: Clock) -> None:
    """Followers have the entry. The leader commits it after it has stored the entry too."""
    counted: list[tuple[int, LogIndex]] = []

    def on_disk_full(_error: rt.DiskFull) -> None:
        counted.append((driven.status.committed, driven.log.synced))
        if len(counted) == 3:
            driven.disk.capacity_bytes = None

    driven = Driven(clock, config_of("n1", NAMES[:3]), on_disk_full=on_disk_full)
    driven.adopt()
    driven.up()
    driven.step()
    driven.lead()
    for peer in driven.config.peers:
        driven.acknowledge(peer, driven.log.last.index)
    committed, last = driven.status.committed, driven.log.last
    driven.disk.capacity_bytes = driven.disk.used_bytes
    [future] = driven.propose(b"x")
    driven.step()
    assert counted == 3 * [(committed, last)]
    assert not future.done()
    driven.acknowledge(driven.config.peers[0], last.index + 1)
    assert future.done()


def test_full_disk_stalls_node_until_space_is_available(clock: Clock) -> None:
    """Meanwhile the node sends nothing, and nothing is lost."""
    asked: list[int] = []

    def on_disk_full(_error: rt.DiskFull) -> None:
        asked.append(len(driven.wire.sent))
        if len(asked) == 3:
            driven.disk.capacity_bytes = None

    driven = Driven(clock, config_of("n1", NAMES[:3]), on_disk_full=on_disk_full)
    driven.adopt()
    driven.disk.capacity_bytes = driven.disk.used_bytes
    assert driven.append(2, INITIAL, entries_of([2])).matched
    assert asked == [0, 0, 0]
    assert driven.reopened("none").contents() == [(2, 2, b"2/2")]


def test_node_with_full_disk_raises_disk_full_without_hook(clock: Clock) -> None:
    driven = member(clock)
    driven.disk.capacity_bytes = driven.disk.used_bytes
    with pytest.raises(rt.DiskFull):
        driven.append(2, INITIAL, entries_of([2]))
    assert driven.wire.sent == []
    driven.disk.capacity_bytes = None
    assert driven.reopened("none").contents() == []


# --- The log: section 5.3, rule 2 ------------------------------------------------------------------------


def test_entries_after_gap_are_rejected(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]))
    reply = driven.append(2, LogIndex(7, 2), entries_of([2], start=8))
    assert (reply.matched, reply.prev, reply.index) == (False, 7, 3)
    assert driven.terms() == [2, 2]


def test_rejection_skips_whole_conflicting_term(clock: Clock) -> None:
    """Section 5.3: one probe for each conflicting term, not for each entry."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 3, 3, 3, 3]))
    reply = driven.append(4, LogIndex(6, 4), peer="n3")
    assert (reply.matched, reply.index) == (False, 2)


def test_rejection_hint_is_not_below_commit_index(clock: Clock) -> None:
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([3, 3, 3, 3, 3]), commit=4)
    reply = driven.append(4, LogIndex(6, 4), peer="n3")
    assert (reply.matched, reply.index) == (False, 4)


@pytest.mark.parametrize("keep", AFTER)
def test_conflicting_tail_is_replaced_by_entries_of_new_leader(clock: Clock, keep: Keep | None) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2]))
    assert driven.append(3, LogIndex(2, 2), entries_of([3, 3], start=3, tag=b"new"), peer="n3").index == 4
    wanted = [(2, 2, b"2/2"), (3, 3, b"3/3new"), (4, 3, b"4/3new")]
    assert driven.contents() == wanted
    assert driven.reopened(keep).contents() == wanted


def test_late_and_repeated_appends_keep_matching_entries_and_write_no_bytes(clock: Clock) -> None:
    """Figure 2: only a conflicting entry and the entries after it are deleted; B4 of PySyncObj."""
    driven = member(clock)
    entries = entries_of([2, 2, 2, 2])
    driven.append(2, INITIAL, entries)
    changes = driven.disk.changes
    late = [
        (INITIAL, entries[:1]),
        (LogIndex(2, 2), ()),
        (INITIAL, ()),
        (LogIndex(3, 2), entries[2:3]),
        (INITIAL, entries),
    ]
    for prev, some in late:
        reply = driven.append(2, prev, some)
        assert (reply.matched, reply.index) == (True, max(prev.index + len(some), 1))
    assert driven.terms() == [2, 2, 2, 2]
    assert driven.disk.changes == changes, "nothing was written again"


def test_acknowledged_index_covers_only_compared_entries(clock: Clock) -> None:
    """An empty heartbeat confirms the entries before it, but not the tail after it."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2]))
    reply = driven.append(3, INITIAL, peer="n3")
    assert (reply.matched, reply.index) == (True, 1)


def terms(*choices: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(choices), max_size=5).map(sorted)


@given(
    common=terms(2, 3),
    own=terms(4, 6),
    leads=terms(5, 7),
    messages=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
)
def test_appends_in_any_order_keep_agreed_prefix_equal_to_leader_log(
    common: list[int], own: list[int], leads: list[int], messages: list[tuple[int, int]]
) -> None:
    """Section 5.3, log matching: entries that agree stay, and entries that were acknowledged do agree.

    After the common entries the logs are from different leaders, and so from different terms.
    """
    leader, follower = (Entries(INITIAL, entries_of(common + tail)) for tail in (leads, own))
    agreed = 1
    for start, size in messages:
        start = min(start, len(common + leads))
        prev = LogIndex(1 + start, leader.term_at(1 + start) or 0)
        entries = tuple(leader.entries(prev.index + 1))[:size]
        verdict = compare(AppendEntries(8, prev, 0, 0, 0, entries), follower, 1)
        if isinstance(verdict, AppendRejected):
            assert verdict.hint < prev.index
            continue
        assert isinstance(verdict, AppendMatched)
        if verdict.cut is not None:
            assert follower.term_at(verdict.cut) != leader.term_at(verdict.cut)
            assert verdict.cut > agreed
            follower.truncate(verdict.cut)
        for entry in verdict.new:
            follower.append(entry)
        agreed = max(agreed, verdict.matched)
        assert all(follower.term_at(at) == leader.term_at(at) for at in range(1, agreed + 1))


def test_conflict_with_committed_entry_at_previous_index_raises_diverged(clock: Clock) -> None:
    """Section 5.4.3: this is impossible, so a node that sees it does not continue."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    with pytest.raises(Diverged, match="committed entry"):
        driven.append(3, LogIndex(3, 3), peer="n3")


def test_conflict_with_committed_entry_inside_append_raises_diverged(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    with pytest.raises(Diverged, match="committed entry"):
        driven.append(3, INITIAL, entries_of([3, 3, 3]), peer="n3")


def test_commit_index_does_not_pass_entries_compared_with_current_leader(clock: Clock) -> None:
    """Figure 2: min(leaderCommit, index of last *new* entry); B1 of PySyncObj."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2]), commit=1)
    driven.append(3, INITIAL, commit=4, peer="n3")
    assert driven.status.committed == 1
    driven.append(3, LogIndex(2, 2), commit=4, peer="n3")
    assert driven.status.committed == 2
    assert driven.commands == [b"2/2"]


def test_snapshot_chunk_does_not_advance_commit_index(clock: Clock) -> None:
    """B1 of PySyncObj, where it was fatal."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2]), commit=1)
    driven.hear(
        "n3",
        InstallSnapshot(3, LogIndex(9, 3), 10, bytes(32), 0, b"abc"),
        AppendEntries(3, LogIndex(9, 3), 9, 0, 0, ()),
    )
    driven.step()
    assert (driven.status.committed, driven.commands) == (1, [])


def test_commit_index_does_not_decrease_under_leader_with_lower_commit_index(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    driven.append(3, LogIndex(3, 2), commit=1, peer="n3")
    driven.step()
    assert (driven.status.committed, driven.status.applied) == (3, 3)


def test_leader_resends_at_once_from_index_of_rejection_hint(clock: Clock) -> None:
    """Section 5.3."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2]))
    driven.lead()
    sent = driven.hear("n2", AppendEntriesReply(driven.raft.term, False, 5, 2, claim_of("n2")))
    append = only(sent, AppendEntries)
    assert (append.prev, len(append.entries)) == (LogIndex(2, 2), 4)


def test_late_rejection_does_not_lower_match_index(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2]))
    term = driven.lead()
    driven.acknowledge("n2", 6)
    driven.hear("n2", AppendEntriesReply(term, False, 5, 1, claim_of("n2")))
    assert driven.raft.leader_role.match_index("n2") == 6
    [future] = driven.propose(b"more")
    append = only([message for to, message in driven.step() if to == "n2"], AppendEntries)
    assert append.prev.index == 6
    assert not future.done()


# --- Committing: sections 5.3, 5.4.2, 5.4.3 --------------------------------------------------------------


def test_entries_of_earlier_term_are_committed_only_with_entry_of_current_term(clock: Clock) -> None:
    """Section 5.4.2, figure 8 (c) and (e): counting replicas of an old entry does not commit it."""
    driven = member(clock, 5)
    driven.append(2, INITIAL, entries_of([2]), commit=1)
    driven.request_vote("n3", 3, LogIndex(2, 2))
    driven.lead()
    for peer in ("n2", "n3", "n4", "n5"):
        driven.acknowledge(peer, 2)
    driven.step()
    assert (driven.status.committed, driven.commands) == (1, [])
    for peer in ("n2", "n3"):
        driven.acknowledge(peer, 3)
    driven.step()
    assert (driven.status.committed, driven.commands) == (3, [b"2/2"])


def test_entry_of_old_term_may_be_overwritten_until_entry_of_later_term_follows(clock: Clock) -> None:
    """Section 5.4.2: S1's entry of term 2 reaches S3 in term 4; in (d) S5 may still overwrite it, in (e) not.

    The node is S3: it has the entry, and decides whether S5 (last entry of term 3) may lead term 5.
    """
    for has_term_4 in (False, True):
        driven = member(clock, 5)
        old = entries_of([2])
        driven.append(4, INITIAL, old, commit=1)
        if has_term_4:
            driven.append(4, LogIndex(2, 2), [RaftEntry(NO_OP, 3, 4)], commit=3)
            assert driven.commands == [] or driven.status.committed == 3
        clear_leader(driven)
        reply = driven.request_vote("n5", 5, LogIndex(2, 3))
        assert reply is not None
        assert reply.granted is not has_term_4
        if not has_term_4:
            assert driven.append(5, INITIAL, entries_of([3], tag=b"S5"), peer="n5").matched
            assert driven.contents() == [(2, 3, b"2/3S5")]
            assert driven.commands == [], "it was never committed"


def test_leader_appends_no_op_entry_of_its_term_on_election(clock: Clock) -> None:
    """Section 8: otherwise the leader would not know what is committed before the first command arrives."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=1)
    term = driven.lead()
    assert driven.log.entry(4) == RaftEntry(NO_OP, 4, term)
    commit_of(driven, 4)
    assert driven.commands == [b"2/2", b"3/2"]


def test_acknowledgements_of_earlier_term_do_not_count(clock: Clock) -> None:
    """B5 of PySyncObj: entries that matched then may have been overwritten since."""
    driven = member(clock)
    term = driven.lead()
    driven.acknowledge("n2", 2, term=term - 1)
    driven.acknowledge("n3", 2, term=term - 1)
    driven.step()
    assert (driven.raft.leader_role.match_index("n2"), driven.status.committed) == (0, 1)


def test_match_index_is_reset_in_new_term_of_leader(clock: Clock) -> None:
    driven = member(clock)
    driven.lead()
    driven.acknowledge("n2", 2)
    driven.hear("n3", RequestVoteReply(7, False, claim_of("n3"), False))
    assert driven.raft.role == "follower"
    assert driven.lead() == 8
    assert driven.raft.leader_role.match_index("n2") == 0


def test_acknowledgement_beyond_leader_log_counts_up_to_last_index(clock: Clock) -> None:
    driven = member(clock)
    driven.lead()
    driven.acknowledge("n2", 1000)
    driven.step()
    assert (driven.raft.leader_role.match_index("n2"), driven.status.committed) == (2, 2)


def test_single_node_leader_commits_only_synced_entries(clock: Clock) -> None:
    """Rule 1: the leader does not count itself before its sync, although section 10.2.1 of the dissertation
    allows it.
    """
    done = 0
    for change in range(1, 60):
        driven = Driven(clock, config_of("n1", ["n1"], bootstrap=True), cluster=CLUSTER)
        clock.advance(0.001)
        driven.step()
        driven.step()
        assert driven.raft.role == "leader"
        driven.disk.cut_power_at(driven.disk.changes + change)
        [future] = driven.propose(b"command")
        try:
            for _ in range(4):
                driven.step()
        except PowerCut:
            pass
        if future.done():
            done += 1
            later = driven.reopened("none")
            clock.advance(0.001)
            later.step()
            later.step()
            assert later.commands == [b"command"]
    assert done


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("keep", AFTER)
def test_later_leaders_have_all_committed_entries_after_restarts(
    clock: Clock, size: int, keep: Keep | None
) -> None:
    """Section 5.4.3, leader completeness: also when leaders fail, or all nodes at once."""
    cluster = Lockstep(clock, NAMES[:size])
    wanted: list[bytes] = []
    for turn in range(4):
        leader = cluster.lead()
        wanted.append(b"turn %d" % turn)
        cluster.commit(wanted[-1])
        cluster.restart(leader.name, keep)
        cluster.run(lambda leader=leader: cluster.leader not in {None, leader})
        assert cluster.lead().log.last.index >= 1 + len(wanted)
    for name in NAMES[:size]:
        cluster.kill(name)
    for name in NAMES[:size]:
        cluster.start(name, cluster.disks[name].after_power_cut("all" if keep is None else keep))
    cluster.lead()
    cluster.converge()
    assert cluster.lead().commands == wanted


# --- No disruption: sections 6 and 9.6 of paper and dissertation, rule 5 ---------------------------------


def test_node_without_pre_votes_never_raises_its_term(clock: Clock) -> None:
    """Dissertation, section 9.6."""
    driven = member(clock)
    changes = driven.disk.changes
    for _ in range(10):
        sent = driven.time_out()
        assert of_kind(sent, RequestVote) == [RequestVote(2, INITIAL, driven.node.claim, pre=True)] * 2
        driven.hear("n2", RequestVoteReply(1, False, claim_of("n2"), True))
    assert (driven.raft.term, driven.disk.changes) == (1, changes)


def test_reconnected_node_does_not_depose_leader(clock: Clock) -> None:
    """Dissertation, section 9.6; B13 of PySyncObj."""
    cluster = Lockstep(clock)
    leader = cluster.lead()
    other = next(name for name in cluster.names if name != leader.name)
    term = leader.raft.term
    for _ in range(3):
        cluster.isolate(other)
        cluster.idle(3)
        assert cluster.members[other].raft.term == term
        cluster.heal()
        cluster.run(lambda: cluster.members[other].raft.leader == leader.name)
        cluster.commit(b"still")
    assert (cluster.lead(), leader.raft.term) == (leader, term)


def test_node_with_active_leader_grants_no_vote(clock: Clock) -> None:
    """Dissertation, section 4.2.3; the node does not adopt the term either."""
    driven = member(clock)
    driven.append(2, INITIAL)
    reply = driven.request_vote("n3", 9, LogIndex(9, 9), pre=True)
    assert reply == RequestVoteReply(2, False, driven.node.claim, True)
    assert driven.request_vote("n3", 9, LogIndex(9, 9)) is None
    assert (driven.raft.term, driven.raft.leader) == (2, "n2")


def test_leader_grants_no_vote(clock: Clock) -> None:
    driven = member(clock)
    term = driven.lead()
    assert driven.request_vote("n3", 9, LogIndex(9, 9)) is None
    assert (driven.raft.role, driven.raft.term) == ("leader", term)


@pytest.mark.parametrize("term", [2, 3])
def test_pre_vote_is_rejected_for_current_or_earlier_term(clock: Clock, term: int) -> None:
    """The reply contains the node's own term."""
    driven = member(clock)
    driven.append(3, INITIAL)
    clear_leader(driven)
    reply = driven.request_vote("n3", term, LogIndex(9, 9), pre=True)
    assert reply == RequestVoteReply(3, False, driven.node.claim, True)


def test_node_votes_again_after_leader_times_out(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL)
    clear_leader(driven)
    reply = driven.request_vote("n3", 3, INITIAL)
    assert reply is not None
    assert reply.granted


def test_node_votes_at_once_and_campaigns_early_after_losing_connection_to_leader(clock: Clock) -> None:
    """The leader's process has ended, so the node need not wait for the rest of the election timeout."""
    driven = member(clock)
    driven.append(2, INITIAL)
    driven.wire.drop("n2")
    driven.step()
    reply = driven.request_vote("n3", 3, INITIAL, pre=True)
    assert reply is not None
    assert reply.granted
    clock.advance(driven.config.election_ms_min / 1000 / 3 + 0.001)
    assert of_kind(driven.step(), RequestVote) == [RequestVote(3, INITIAL, driven.node.claim, pre=True)]


def test_node_keeps_waiting_after_losing_connection_to_other_follower(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL)
    driven.wire.drop("n3")
    driven.step()
    clock.advance(driven.config.election_ms_min / 1000 / 3 + 0.001)
    assert of_kind(driven.step() + driven.step(), RequestVote) == []
    assert driven.request_vote("n3", 3, INITIAL) is None


@pytest.mark.parametrize("is_connected", [True, False])
def test_leader_without_contact_to_majority_steps_down(clock: Clock, is_connected: bool) -> None:
    """Dissertation, section 6.2."""
    driven = member(clock)
    term = driven.lead()
    if not is_connected:
        for peer in ("n2", "n3"):
            driven.wire.drop(peer)
    clock.advance(driven.config.election_ms_max / 1000 + 0.001)
    driven.step()
    assert (driven.raft.role, driven.raft.leader, driven.raft.term) == ("follower", None, term)


def test_leader_with_contact_to_bare_majority_remains_leader(clock: Clock) -> None:
    driven = member(clock, 5)
    driven.lead()
    for _ in range(30):
        clock.advance(0.1)
        for peer in ("n2", "n5"):
            driven.acknowledge(peer, 2)
    assert driven.raft.role == "leader"


def test_late_pre_votes_do_not_count(clock: Clock) -> None:
    driven = member(clock)
    driven.time_out()
    driven.append(2, INITIAL)
    driven.grant("n3", 2, pre=True)
    driven.grant("n3", 3, pre=True)
    driven.step()
    assert (driven.raft.role, driven.raft.term, driven.raft.leader) == ("follower", 2, "n2")
