"""The claims of the Raft paper, one by one, on a node that is driven message by message.

Sections are those of Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm", extended
version of 2014; "dissertation" is Ongaro's of the same year. Rule n is of docs/raft.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest
from disks import Keep, PowerCut
from hypothesis import given
from hypothesis import strategies as st
from raft_bench import (
    CLUSTER,
    DIRECTORY,
    Clock,
    Driven,
    ListMachine,
    Lockstep,
    claim_of,
    config_of,
    disk_id,
    entries_of,
    of_kind,
    only,
    virtual_clock,
)

import rt
from rt.errors import Corrupt, Diverged, Overloaded
from sequencer.raft.core.follower import AppendMatched, AppendRejected, compare
from sequencer.raft.model.cluster_state import INITIAL, encode_state, initial_state
from sequencer.raft.model.entry_codec import (
    NO_OP,
    PACK_BYTES,
    JoinEntry,
    decode_content,
    encode_commands,
    encode_join,
)
from sequencer.raft.model.messages import (
    COMMAND_BYTES_MAX,
    NO_ID,
    Admit,
    AppendEntries,
    AppendEntriesReply,
    DiskClaim,
    FetchState,
    Forward,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
)
from sequencer.raft.proposals import PACKS_MAX
from sequencer.raft.storage.log_entries import Entries

NAMES = ["n1", "n2", "n3", "n4", "n5"]
AFTER: list[Keep | None] = [None, "none", "some"]
"""How a run ends: kill -9, a power cut that takes all that was not synced, one that takes some of it."""


@pytest.fixture
def clock() -> Iterator[Clock]:
    with virtual_clock() as clock:
        yield clock


def member(clock: Clock, members: int = 3, **settings: object) -> Driven:
    """A member of a new cluster, all peers connected, that has heard of nobody yet."""
    driven = Driven(clock, config_of("n1", NAMES[:members], **settings))
    driven.adopt()
    return driven


def clear_leader(driven: Driven) -> None:
    """Let so much time go by that the leader does not count as heard any more."""
    driven.clock.advance(driven.config.election_ms_min / 1000 + 0.001)


def commit_of(driven: Driven, index: int) -> None:
    """As a leader, hear a majority acknowledge up to `index`, and commit."""
    for peer in driven.config.peers[: len(driven.config.members) // 2]:
        driven.acknowledge(peer, index)
    driven.step()
    assert driven.status.committed >= index


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
def test_only_a_candidate_whose_log_is_at_least_as_complete_gets_a_vote(
    clock: Clock, last: LogIndex, granted: bool, pre: bool
) -> None:
    """Section 5.4.1: the later last term wins, then the longer log."""
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([2, 3]))
    clear_leader(driven)
    reply = driven.request_vote("n3", 7, last, pre=pre)
    assert reply == RequestVoteReply(7 if granted or not pre else 3, granted, driven.node.claim, pre)
    assert (driven.log.term, driven.log.voted_for) == ((3, None) if pre else (7, "n3" if granted else None))


def test_a_node_votes_once_in_a_term(clock: Clock) -> None:
    """Section 5.2; the same candidate may ask again, as its answer may be lost."""
    driven = member(clock)
    asked = [("n2", True), ("n3", False), ("n2", True)]
    for peer, granted in asked:
        reply = driven.request_vote(peer, 5, INITIAL)
        assert reply is not None
        assert (reply.term, reply.granted) == (5, granted)


@pytest.mark.parametrize("keep", AFTER)
def test_a_vote_outlives_its_node(clock: Clock, keep: Keep | None) -> None:
    """Figure 2: currentTerm and votedFor are persistent."""
    driven = member(clock)
    driven.request_vote("n2", 5, INITIAL)
    driven = driven.reopened(keep)
    assert (driven.log.term, driven.log.voted_for) == (5, "n2")
    reply = driven.request_vote("n3", 5, INITIAL)
    assert reply is not None
    assert not reply.granted


@pytest.mark.parametrize("keep", AFTER)
def test_a_candidates_vote_for_itself_outlives_it(clock: Clock, keep: Keep | None) -> None:
    driven = member(clock)
    term = driven.stand()
    driven = driven.reopened(keep)
    assert (driven.log.term, driven.log.voted_for, driven.raft.role) == (term, "n1", "follower")
    reply = driven.request_vote("n2", term, INITIAL)
    assert reply is not None
    assert not reply.granted


def test_a_candidate_leads_with_a_majority_of_different_voters(clock: Clock) -> None:
    """Section 5.2; a vote counts once a voter (B8 of PySyncObj)."""
    driven = member(clock, 5)
    term = driven.stand()
    for _ in range(4):
        driven.grant("n2", term, pre=False)
    assert driven.raft.role == "candidate"
    driven.grant("n4", term, pre=False)
    assert driven.raft.role == "leader"


def test_support_beforehand_counts_once_a_voter(clock: Clock) -> None:
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


def test_a_candidate_follows_the_leader_of_its_term(clock: Clock) -> None:
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
def test_whoever_hears_of_a_later_term_follows(clock: Clock, role: str, kind: str) -> None:
    """Section 5.1."""
    driven = member(clock)
    if role == "leader":
        driven.lead()
    else:
        driven.stand()
    is_answer_to_leader = kind in {"acknowledgement", "chunk"}
    driven.hear("n2", LATER[kind])
    if role == "candidate" and is_answer_to_leader:
        return  # Nobody answers what a candidate cannot have sent; whether it listens is its own affair.
    assert (driven.raft.role, driven.raft.term, driven.log.term) == ("follower", 9, 9)
    assert driven.log.voted_for is None


def test_a_stale_leader_is_notified_of_the_new_term_and_not_followed(clock: Clock) -> None:
    """Section 5.1: and what it sends changes nothing."""
    driven = member(clock)
    driven.append(5, INITIAL, entries_of([5]))
    before = driven.contents()
    reply = driven.append(4, INITIAL, entries_of([4, 4]), commit=3, peer="n3")
    assert (reply.term, reply.matched) == (5, False)
    assert (driven.contents(), driven.status.committed, driven.raft.leader) == (before, 1, "n2")
    chunk = InstallSnapshot(4, LogIndex(9, 4), 3, bytes(32), 0, b"abc")
    assert driven.hear("n3", chunk) == []
    assert driven.raft.leader == "n2"


def test_a_deposed_leader_learns_of_it_from_the_answer(clock: Clock) -> None:
    """B11 of PySyncObj: a stale leader heard nothing."""
    driven = member(clock)
    driven.lead()
    driven.hear("n2", AppendEntriesReply(9, False, 2, 1, claim_of("n2")))
    assert (driven.raft.role, driven.raft.leader, driven.raft.term) == ("follower", None, 9)


def test_two_leaders_in_one_term_stop_the_node(clock: Clock) -> None:
    """Section 5.2: election safety. Who sees it broken must not go on."""
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
    """Whether the disk after the cut stands by what left before it."""
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
def test_what_left_a_node_is_on_its_disk_wherever_the_power_goes(
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
                continue  # A later leader cut what this one had.
            assert _is_kept(message, peer, later), (change, message)
            left += 1
        if not is_cut:
            assert left
            return
    pytest.fail("it never ends")


def test_nothing_leaves_after_a_failed_sync(clock: Clock) -> None:
    """Rule 1: a failed fsync is final."""
    driven = member(clock)
    driven.disk.fail("sync")
    with pytest.raises(rt.StorageFailed):
        driven.append(2, INITIAL, entries_of([2]))
    assert driven.wire.sent == []
    with pytest.raises(rt.StorageFailed):
        driven.step()
    assert driven.wire.sent == []


def test_nothing_is_applied_before_it_is_synced(clock: Clock) -> None:
    """What a state machine does may be seen at once."""
    driven = member(clock)
    apply, synced = driven.machine.apply, []

    def watch(index: int, command: bytes) -> None:
        synced.append(driven.log.synced.index)
        apply(index, command)

    driven.machine.apply = watch  # type: ignore[method-assign]
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    assert synced == [3, 3]


def test_a_leader_whose_sync_fails_counts_nothing_and_is_heard_no_more(clock: Clock) -> None:
    """Dissertation, section 10.2.1: its entries are under way while it syncs them itself."""
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
def test_what_a_leader_sent_and_did_not_sync_is_another_terms_next_time(
    clock: Clock, keep: Keep | None
) -> None:
    """Its term and its vote for itself are on its disk before it leads: it never leads that term again."""
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


def test_a_leader_without_space_sends_but_counts_nothing(clock: Clock) -> None:
    """Followers have the entry; the leader commits it once it has it too."""
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


def test_a_full_disk_stalls_the_node_until_there_is_space(clock: Clock) -> None:
    """Nothing leaves meanwhile, and nothing is lost."""
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


def test_a_hook_may_end_a_node_whose_disk_is_full(clock: Clock) -> None:
    driven = member(clock)
    driven.disk.capacity_bytes = driven.disk.used_bytes
    with pytest.raises(rt.DiskFull):
        driven.append(2, INITIAL, entries_of([2]))
    assert driven.wire.sent == []
    driven.disk.capacity_bytes = None
    assert driven.reopened("none").contents() == []


# --- The log: section 5.3, rule 2 ------------------------------------------------------------------------


def test_entries_after_a_gap_are_refused(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]))
    reply = driven.append(2, LogIndex(7, 2), entries_of([2], start=8))
    assert (reply.matched, reply.prev, reply.index) == (False, 7, 3)
    assert driven.terms() == [2, 2]


def test_a_refusal_steps_over_the_whole_term_that_differs(clock: Clock) -> None:
    """Section 5.3: one probe for each conflicting term, not for each entry."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 3, 3, 3, 3]))
    reply = driven.append(4, LogIndex(6, 4), peer="n3")
    assert (reply.matched, reply.index) == (False, 2)


def test_a_refusal_never_asks_for_what_is_committed(clock: Clock) -> None:
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([3, 3, 3, 3, 3]), commit=4)
    reply = driven.append(4, LogIndex(6, 4), peer="n3")
    assert (reply.matched, reply.index) == (False, 4)


@pytest.mark.parametrize("keep", AFTER)
def test_a_conflicting_tail_gives_way(clock: Clock, keep: Keep | None) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2]))
    assert driven.append(3, LogIndex(2, 2), entries_of([3, 3], start=3, tag=b"new"), peer="n3").index == 4
    wanted = [(2, 2, b"2/2"), (3, 3, b"3/3new"), (4, 3, b"4/3new")]
    assert driven.contents() == wanted
    assert driven.reopened(keep).contents() == wanted


def test_late_and_repeated_appends_never_cut_what_matches(clock: Clock) -> None:
    """Figure 2: only an existing entry that conflicts is deleted, with those behind it; B4 of PySyncObj."""
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


def test_an_acknowledgement_says_only_what_was_compared(clock: Clock) -> None:
    """An empty heartbeat vouches for what is before it, not for the tail behind."""
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
def test_in_whatever_order_appends_arrive_a_log_only_comes_closer_to_the_leaders(
    common: list[int], own: list[int], leads: list[int], messages: list[tuple[int, int]]
) -> None:
    """Section 5.3, log matching: what agrees stays, and what was said to agree does.

    Behind what is common the logs are of different leaders, so of different terms.
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


def test_a_committed_entry_that_differs_from_the_leaders_stops_the_node(clock: Clock) -> None:
    """Section 5.4.3: it cannot be; who sees it does not go on."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    with pytest.raises(Diverged, match="committed entry"):
        driven.append(3, LogIndex(3, 3), peer="n3")


def test_a_committed_entry_that_differs_inside_a_message_stops_the_node(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    with pytest.raises(Diverged, match="committed entry"):
        driven.append(3, INITIAL, entries_of([3, 3, 3]), peer="n3")


def test_a_commit_index_never_passes_what_was_compared_with_this_leader(clock: Clock) -> None:
    """Figure 2: min(leaderCommit, index of last *new* entry); B1 of PySyncObj."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2]), commit=1)
    driven.append(3, INITIAL, commit=4, peer="n3")
    assert driven.status.committed == 1
    driven.append(3, LogIndex(2, 2), commit=4, peer="n3")
    assert driven.status.committed == 2
    assert driven.commands == [b"2/2"]


def test_a_snapshots_chunk_commits_nothing_of_the_log(clock: Clock) -> None:
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


def test_a_commit_index_does_not_fall_under_a_leader_that_knows_less(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    driven.append(3, LogIndex(3, 2), commit=1, peer="n3")
    driven.step()
    assert (driven.status.committed, driven.status.applied) == (3, 3)


def test_a_leader_steps_back_to_where_a_follower_agrees(clock: Clock) -> None:
    """Section 5.3: and sends from there at once."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2]))
    driven.lead()
    sent = driven.hear("n2", AppendEntriesReply(driven.raft.term, False, 5, 2, claim_of("n2")))
    append = only(sent, AppendEntries)
    assert (append.prev, len(append.entries)) == (LogIndex(2, 2), 4)


def test_a_late_refusal_does_not_take_back_what_was_acknowledged(clock: Clock) -> None:
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


def test_entries_of_an_earlier_term_are_committed_only_by_one_of_the_leaders_own(clock: Clock) -> None:
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


def test_figure_8(clock: Clock) -> None:
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


def test_a_leader_starts_its_term_with_an_entry_of_its_own(clock: Clock) -> None:
    """Section 8: else it would not know what is committed before the first command comes."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=1)
    term = driven.lead()
    assert driven.log.entry(4) == RaftEntry(NO_OP, 4, term)
    commit_of(driven, 4)
    assert driven.commands == [b"2/2", b"3/2"]


def test_acknowledgements_of_an_earlier_term_do_not_count(clock: Clock) -> None:
    """B5 of PySyncObj: what was matched then may be overwritten since."""
    driven = member(clock)
    term = driven.lead()
    driven.acknowledge("n2", 2, term=term - 1)
    driven.acknowledge("n3", 2, term=term - 1)
    driven.step()
    assert (driven.raft.leader_role.match_index("n2"), driven.status.committed) == (0, 1)


def test_what_was_acknowledged_in_an_earlier_term_counts_for_nothing_in_a_new_one(clock: Clock) -> None:
    driven = member(clock)
    driven.lead()
    driven.acknowledge("n2", 2)
    driven.hear("n3", RequestVoteReply(7, False, claim_of("n3"), False))
    assert driven.raft.role == "follower"
    assert driven.lead() == 8
    assert driven.raft.leader_role.match_index("n2") == 0


def test_an_acknowledgement_beyond_the_leaders_log_counts_up_to_its_end(clock: Clock) -> None:
    driven = member(clock)
    driven.lead()
    driven.acknowledge("n2", 1000)
    driven.step()
    assert (driven.raft.leader_role.match_index("n2"), driven.status.committed) == (2, 2)


def test_a_leader_alone_commits_only_what_it_has_synced(clock: Clock) -> None:
    """Rule 1: it does not count itself before, as section 10.2.1 of the dissertation would allow."""
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
def test_every_later_leader_has_what_was_committed(clock: Clock, size: int, keep: Keep | None) -> None:
    """Section 5.4.3, leader completeness: through deaths of leaders, and of all at once."""
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


# --- Peace: sections 6 and 9.6 of paper and dissertation, rule 5 -----------------------------------------


def test_a_node_without_support_never_raises_its_term(clock: Clock) -> None:
    """Dissertation, section 9.6."""
    driven = member(clock)
    changes = driven.disk.changes
    for _ in range(10):
        sent = driven.time_out()
        assert of_kind(sent, RequestVote) == [RequestVote(2, INITIAL, driven.node.claim, pre=True)] * 2
        driven.hear("n2", RequestVoteReply(1, False, claim_of("n2"), True))
    assert (driven.raft.term, driven.disk.changes) == (1, changes)


def test_a_node_that_was_cut_off_does_not_depose_the_leader(clock: Clock) -> None:
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


def test_a_node_that_hears_a_leader_gives_no_vote(clock: Clock) -> None:
    """Dissertation, section 4.2.3: nor does it take over the term."""
    driven = member(clock)
    driven.append(2, INITIAL)
    reply = driven.request_vote("n3", 9, LogIndex(9, 9), pre=True)
    assert reply == RequestVoteReply(2, False, driven.node.claim, True)
    assert driven.request_vote("n3", 9, LogIndex(9, 9)) is None
    assert (driven.raft.term, driven.raft.leader) == (2, "n2")


def test_a_leader_gives_no_vote(clock: Clock) -> None:
    driven = member(clock)
    term = driven.lead()
    assert driven.request_vote("n3", 9, LogIndex(9, 9)) is None
    assert (driven.raft.role, driven.raft.term) == ("leader", term)


@pytest.mark.parametrize("term", [2, 3])
def test_support_is_refused_for_a_term_that_has_begun(clock: Clock, term: int) -> None:
    """And the answer tells which one has."""
    driven = member(clock)
    driven.append(3, INITIAL)
    clear_leader(driven)
    reply = driven.request_vote("n3", term, LogIndex(9, 9), pre=True)
    assert reply == RequestVoteReply(3, False, driven.node.claim, True)


def test_a_node_that_does_not_hear_its_leader_any_more_votes_again(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL)
    clear_leader(driven)
    reply = driven.request_vote("n3", 3, INITIAL)
    assert reply is not None
    assert reply.granted


def test_who_loses_the_connection_with_its_leader_stands_soon_and_votes_at_once(clock: Clock) -> None:
    """The leader's process has ended: the rest of the election timeout need not be waited for."""
    driven = member(clock)
    driven.append(2, INITIAL)
    driven.wire.drop("n2")
    driven.step()
    reply = driven.request_vote("n3", 3, INITIAL, pre=True)
    assert reply is not None
    assert reply.granted
    clock.advance(driven.config.election_ms_min / 1000 / 3 + 0.001)
    assert of_kind(driven.step(), RequestVote) == [RequestVote(3, INITIAL, driven.node.claim, pre=True)]


def test_who_loses_another_connection_waits(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL)
    driven.wire.drop("n3")
    driven.step()
    clock.advance(driven.config.election_ms_min / 1000 / 3 + 0.001)
    assert of_kind(driven.step() + driven.step(), RequestVote) == []
    assert driven.request_vote("n3", 3, INITIAL) is None


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_leader_that_hears_no_majority_steps_down(clock: Clock, is_connected: bool) -> None:
    """Dissertation, section 6.2."""
    driven = member(clock)
    term = driven.lead()
    if not is_connected:
        for peer in ("n2", "n3"):
            driven.wire.drop(peer)
    clock.advance(driven.config.election_ms_max / 1000 + 0.001)
    driven.step()
    assert (driven.raft.role, driven.raft.leader, driven.raft.term) == ("follower", None, term)


def test_a_leader_that_hears_a_bare_majority_continues(clock: Clock) -> None:
    driven = member(clock, 5)
    driven.lead()
    for _ in range(30):
        clock.advance(0.1)
        for peer in ("n2", "n5"):
            driven.acknowledge(peer, 2)
    assert driven.raft.role == "leader"


def test_support_that_comes_late_counts_for_nothing(clock: Clock) -> None:
    driven = member(clock)
    driven.time_out()
    driven.append(2, INITIAL)
    driven.grant("n3", 2, pre=True)
    driven.grant("n3", 3, pre=True)
    driven.step()
    assert (driven.raft.role, driven.raft.term, driven.raft.leader) == ("follower", 2, "n2")


# --- Snapshots: section 7, rule 3 ------------------------------------------------------------------------


class Snapshot:
    """What a leader would send that has applied these entries behind the first one."""

    def __init__(self, entries: tuple[RaftEntry, ...], disks: dict[str, bytes] | None = None) -> None:
        state, machine = (
            initial_state(CLUSTER, 1, disks or {name: disk_id(name) for name in NAMES[:3]}),
            ListMachine(),
        )
        for entry in entries:
            applied = state.apply(entry)
            if applied is not None and applied.first is not None:
                for index, command in enumerate(applied.pack.commands, applied.first):
                    machine.apply(index, command)
        self.place, self.commands = state.applied, machine.commands
        self.content = encode_state(state) + machine.snapshot()()
        self.digest = hashlib.sha256(self.content).digest()

    def chunk(self, term: int, start: int, end: int) -> InstallSnapshot:
        return InstallSnapshot(
            term, self.place, len(self.content), self.digest, start, self.content[start:end]
        )

    def chunks(self, term: int, size: int = 100) -> list[InstallSnapshot]:
        return [self.chunk(term, at, at + size) for at in range(0, len(self.content), size)]


@pytest.mark.parametrize("keep", AFTER)
def test_an_installed_snapshot_takes_the_place_of_the_log(clock: Clock, keep: Keep | None) -> None:
    driven = member(clock)
    snapshot = Snapshot(entries_of([2, 2, 2]))
    replies = driven.hear("n2", *snapshot.chunks(2))
    assert [reply.offset for reply in replies if isinstance(reply, InstallSnapshotReply)][-1] == len(
        snapshot.content
    )
    reply = driven.append(2, snapshot.place, entries_of([2], start=5), commit=5)
    assert (reply.matched, reply.index) == (True, 5)
    assert (driven.commands, driven.log.base) == ([*snapshot.commands, b"5/2"], snapshot.place)
    driven = driven.reopened(keep)
    assert (driven.commands, driven.log.base, driven.terms()) == (snapshot.commands, snapshot.place, [2])


def test_an_installed_snapshot_keeps_the_entries_after_it(clock: Clock) -> None:
    """Figure 13: if an entry has index and term of the snapshot's last, retain the entries following it."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2, 2]), commit=1)
    driven.hear("n2", *Snapshot(entries_of([2, 2, 2])).chunks(2))
    driven.step()
    assert (driven.status.applied, driven.log.last) == (4, LogIndex(6, 2))
    assert driven.append(2, LogIndex(6, 2), commit=6).index == 6
    driven.step()
    assert driven.commands == [b"2/2", b"3/2", b"4/2", b"5/2", b"6/2"]


def test_an_installed_snapshot_discards_a_log_that_differs(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2, 2]), commit=1)
    snapshot = Snapshot(entries_of([3, 3, 3], tag=b"other"))
    driven.hear("n3", *snapshot.chunks(3))
    driven.step()
    assert (driven.log.base, driven.terms(), driven.commands) == (LogIndex(4, 3), [], snapshot.commands)


def test_an_old_snapshot_never_rolls_back_what_is_committed(clock: Clock) -> None:
    """B7 of PySyncObj."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2, 2]), commit=6)
    driven.step()
    snapshot = Snapshot(entries_of([2, 2]))
    [reply] = driven.hear("n2", snapshot.chunk(2, 0, 50))
    length = len(snapshot.content)
    assert reply == InstallSnapshotReply(2, snapshot.place, 50, length, True, driven.node.claim)
    assert (driven.status.applied, len(driven.commands), driven.status.snapshot) == (6, 5, 1)


def test_a_log_that_was_quicker_than_the_snapshot_is_not_rolled_back(clock: Clock) -> None:
    driven = member(clock)
    driven.worker.is_held = True
    driven.hear("n2", *Snapshot(entries_of([2, 2, 2])).chunks(2))
    driven.append(2, INITIAL, entries_of([2] * 6), commit=7)
    driven.step()
    assert driven.status.applied == 7
    driven.worker.is_held = False
    driven.step()
    assert (driven.status.applied, len(driven.commands), driven.log.last) == (7, 6, LogIndex(7, 2))
    assert len(driven.reopened("none").terms()) == 6


def test_pieces_that_come_twice_or_too_early_change_nothing(clock: Clock) -> None:
    driven = member(clock)
    snapshot = Snapshot(entries_of([2, 2, 2]))
    offsets = []
    for start, end in [(0, 60), (100, 160), (0, 60), (30, 90), (90, len(snapshot.content))]:
        reply = driven.hear("n2", snapshot.chunk(2, start, end))[0]
        assert isinstance(reply, InstallSnapshotReply)
        offsets.append(reply.offset)
    assert offsets == [60, 60, 60, 90, len(snapshot.content)]
    driven.step()
    assert driven.commands == snapshot.commands


def test_a_snapshot_that_is_not_what_was_announced_is_not_taken(clock: Clock) -> None:
    """A7 of PySyncObj; the right one is taken when it comes."""
    driven = member(clock)
    snapshot = Snapshot(entries_of([2, 2, 2]))
    *chunks, last = snapshot.chunks(2)
    driven.hear("n2", *chunks, last._replace(data=bytes(len(last.data))))
    driven.step()
    assert (driven.status.applied, driven.status.snapshot, driven.commands) == (1, 1, [])
    driven.hear("n2", *snapshot.chunks(2))
    driven.step()
    assert driven.commands == snapshot.commands


def test_a_transfer_that_a_restart_broke_off_starts_again(clock: Clock) -> None:
    driven = member(clock)
    snapshot = Snapshot(entries_of([2, 2, 2]))
    driven.hear("n2", snapshot.chunk(2, 0, 100))
    driven = driven.reopened()
    [reply] = driven.hear("n2", snapshot.chunk(2, 100, 150))
    assert isinstance(reply, InstallSnapshotReply)
    assert (reply.offset, reply.installed) == (0, False)
    driven.hear("n2", *snapshot.chunks(2))
    driven.step()
    assert driven.commands == snapshot.commands


def test_a_newer_snapshot_takes_over_from_one_that_is_half_here(clock: Clock) -> None:
    """Another leader's too."""
    driven = member(clock)
    driven.hear("n2", Snapshot(entries_of([2, 2])).chunk(2, 0, 100))
    newer = Snapshot(entries_of([2, 2, 3]))
    driven.hear("n3", *newer.chunks(3))
    driven.step()
    assert (driven.commands, driven.raft.leader) == (newer.commands, "n3")


def test_the_next_leader_continues_with_the_same_snapshot(clock: Clock) -> None:
    driven = member(clock)
    snapshot = Snapshot(entries_of([2, 2, 2]))
    driven.hear("n2", snapshot.chunk(2, 0, 100))
    [reply] = driven.hear("n3", snapshot.chunk(3, 0, 100))
    assert isinstance(reply, InstallSnapshotReply)
    assert (reply.term, reply.offset) == (3, 100)
    driven.hear("n3", snapshot.chunk(3, 100, len(snapshot.content)))
    driven.step()
    assert driven.commands == snapshot.commands


def test_a_follower_acknowledges_while_it_installs(clock: Clock) -> None:
    """So that its leader goes on leading; the answer promises nothing."""
    driven = member(clock)
    driven.worker.is_held = True
    snapshot = Snapshot(entries_of([2, 2, 2]))
    driven.hear("n2", *snapshot.chunks(2))
    for _ in range(3):
        reply = driven.append(2, snapshot.place, commit=4)
        assert (reply.matched, reply.index) == (False, 1)
    assert driven.status.applied == 1


def test_a_transfer_that_is_not_needed_any_more_does_not_keep_a_node_from_snapshots(clock: Clock) -> None:
    driven = member(clock, snapshot_ms=100)
    driven.hear("n2", Snapshot(entries_of([2, 2])).chunk(2, 0, 100))
    driven.append(3, INITIAL, entries_of([2, 2, 2]), commit=4, peer="n3")
    for _ in range(4):
        clock.advance(0.1)
        driven.step()
    assert driven.status.snapshot == 4


@pytest.mark.parametrize("keep", ["all", "none", "some"])
def test_an_install_that_the_power_cut_leaves_the_old_state_or_the_new(clock: Clock, keep: Keep) -> None:
    snapshot = Snapshot(entries_of([3, 3, 3], tag=b"other"))
    seen = set()
    for change in range(1, 100):
        driven = member(clock)
        driven.append(2, INITIAL, entries_of([2, 2]), commit=1)
        driven.disk.cut_power_at(driven.disk.changes + change)
        try:
            _install_of(driven, snapshot)
        except PowerCut:
            pass
        else:
            break
        later = driven.reopened(keep, seed=change)
        state = (later.status.applied, later.log.base, tuple(later.terms()))
        assert state in {(1, INITIAL, (2, 2)), (4, LogIndex(4, 3), ())}
        assert later.commands == (snapshot.commands if later.status.applied == 4 else [])
        seen.add(later.status.applied)
        assert later.append(4, snapshot.place if later.status.applied == 4 else INITIAL).matched
    assert seen == {1, 4}


def _install_of(driven: Driven, snapshot: Snapshot) -> None:
    driven.hear("n3", *snapshot.chunks(3))
    driven.step()
    driven.step()


def test_a_damaged_snapshot_stops_the_node(clock: Clock) -> None:
    """Rule 3; A7 of PySyncObj, which went on with an empty state."""
    driven = member(clock)
    driven.hear("n2", *Snapshot(entries_of([2, 2, 2])).chunks(2))
    driven.step()
    driven.disk.flip_bit(f"{DIRECTORY}/snapshot.4", 150, 3)
    with pytest.raises(Corrupt):
        driven.reopened()


def behind(cluster: Lockstep, commands: int = 30) -> str:
    """Cut a follower off until what it lacks is in no log any more; its name."""
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    cluster.isolate(name)
    while leader.log.base.index <= cluster.members[name].log.last.index:
        for member in cluster.members.values():
            member.log._segment_bytes = 1000
        cluster.commit(*[b"%d" % at * 100 for at in range(commands)], via=leader.name)
        cluster.idle(0.15)
    return name


def test_a_follower_with_a_large_lag_is_sent_the_snapshot_and_then_the_log(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1)
    name = behind(cluster)
    assert cluster.lead().name != name
    cluster.heal()
    cluster.converge()
    assert cluster.members[name].log.base.index > 1
    cluster.commit(b"more", via=name)
    cluster.converge()


def test_a_spoiled_transfer_is_made_again(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1)
    name = behind(cluster)
    spoiled: list[InstallSnapshot] = []

    def spoil(sender: str, to: str, message: Message) -> bool:
        if isinstance(message, InstallSnapshot) and not spoiled:
            spoiled.append(message)
            cluster.members[to].wire.put(sender, message._replace(data=bytes(len(message.data))))
            return True
        return False

    cluster.drop_message = spoil
    cluster.heal()
    cluster.converge()
    assert spoiled
    assert cluster.members[name].log.base.index > 1


def test_a_lost_piece_is_sent_again(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1)
    behind(cluster)
    lost: list[Message] = []

    def lose(_sender: str, _to: str, message: Message) -> bool:
        is_lost = isinstance(message, InstallSnapshot | InstallSnapshotReply) and len(lost) < 4
        lost.extend([message] * is_lost)
        return is_lost

    cluster.drop_message = lose
    cluster.heal()
    cluster.converge()
    assert len(lost) == 4


def test_a_leader_continues_while_its_only_follower_installs(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1)
    name = behind(cluster)
    leader = cluster.lead()
    cluster.members[name].worker.is_held = True
    cluster.heal()
    cluster.run(lambda: cluster.members[name].worker.waiting)
    third = next(other for other in cluster.names if other not in {name, leader.name})
    cluster.kill(third)
    cluster.idle(3)
    assert leader.raft.role == "leader"
    cluster.members[name].worker.is_held = False
    cluster.commit(b"with two of three")
    cluster.converge()


def test_compaction_keeps_a_tail_for_slow_followers(clock: Clock) -> None:
    """docs/raft.md, rule 3."""
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=20)
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    cluster.isolate(name)
    for member in cluster.members.values():
        member.log._segment_bytes = 300
    for at in range(12):
        cluster.commit(b"%d" % at, via=leader.name)
    cluster.idle(0.3)
    assert leader.status.snapshot == leader.status.applied
    sent: list[Message] = []
    cluster.drop_message = lambda _sender, _to, message: bool(sent.append(message))
    cluster.heal()
    cluster.converge()
    assert not [message for message in sent if isinstance(message, InstallSnapshot)]


# --- Commands: section 8, rule 4 -------------------------------------------------------------------------


def test_commands_are_packed(clock: Clock) -> None:
    """A thousand small ones are few entries; large ones do not wait for each other."""
    driven = member(clock)
    driven.lead()
    driven.propose(*[b"%d" % at for at in range(1000)])
    driven.step()
    assert driven.log.last.index == 3
    driven.propose(*[bytes(PACK_BYTES // 2)] * 5, bytes(COMMAND_BYTES_MAX))
    driven.step()
    sizes = [len(decode_content(entry.content).commands) for entry in driven.log.entries(4)]
    assert sizes == [2, 2, 1, 1]


def test_too_much_in_flight_is_refused_and_nothing_of_it_taken(clock: Clock) -> None:
    driven = member(clock, commands_max=3)
    driven.lead()
    driven.propose(b"a", b"b", b"c")
    with pytest.raises(Overloaded):
        driven.propose(b"d")
    driven.step()
    commit_of(driven, driven.log.last.index)
    assert driven.commands == [b"a", b"b", b"c"]
    driven.propose(b"d")


def test_a_command_too_large_is_refused(clock: Clock) -> None:
    driven = member(clock)
    with pytest.raises(rt.MessageTooLarge):
        driven.propose(bytes(COMMAND_BYTES_MAX + 1))
    driven.propose(bytes(COMMAND_BYTES_MAX))


def test_commands_of_one_node_are_applied_in_order_through_deaths_of_leaders(clock: Clock) -> None:
    """Each once; and each future names its place."""
    cluster = Lockstep(clock)
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    wanted, futures = [], []
    for turn in range(60):
        wanted.append(b"%d" % turn)
        futures += cluster.members[name].propose(wanted[-1])
        cluster.round()
        if turn % 15 == 7:
            doomed = cluster.leader
            if doomed is not None and doomed.name != name:
                cluster.restart(doomed.name)
    cluster.run(lambda: all(future.done() for future in futures))
    cluster.converge()
    assert cluster.members[name].commands == wanted
    assert [future.result(0) for future in futures] == list(range(1, 61))


def test_a_command_asked_for_again_is_applied_once(clock: Clock) -> None:
    """Section 8: the leader may die after it committed and before it answered."""
    cluster = Lockstep(clock, retry_ms=50)
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    # The proposer hears of no commit for a while, so it asks again and again.
    cluster.drop_message = lambda _sender, to, message: to == name and isinstance(message, AppendEntries)
    [future] = cluster.members[name].propose(b"once")
    cluster.idle(0.25)
    packs = [entry for entry in leader.log.entries(3) if entry.content[:1] == b"\0"]
    assert len(packs) > 1, "it was asked for again"
    assert leader.commands == [b"once"]
    cluster.drop_message = lambda _sender, _to, _message: False
    cluster.run(future.done)
    cluster.converge()
    assert (future.result(0), leader.commands) == (1, [b"once"])


def test_an_overtaken_command_comes_before_the_one_that_overtook_it(clock: Clock) -> None:
    cluster = Lockstep(clock, retry_ms=1_000_000)  # It is not the time that brings it back.
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    lost: list[Message] = []

    def lose_first(_sender: str, _to: str, message: Message) -> bool:
        if isinstance(message, Forward) and not lost:
            lost.append(message)
            return True
        return False

    cluster.drop_message = lose_first
    futures = []
    for command in (b"first", b"second", b"third"):
        futures += cluster.members[name].propose(command)
        cluster.round()
    cluster.run(lambda: all(future.done() for future in futures))
    cluster.converge()
    assert lost
    assert leader.commands == [b"first", b"second", b"third"]


def test_futures_are_settled_by_a_snapshot_that_covers_their_commands(clock: Clock) -> None:
    """B14 of PySyncObj: their callbacks never came."""
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1)
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    cluster.drop_message = lambda _sender, to, message: to == name and isinstance(message, AppendEntries)
    futures = cluster.members[name].propose(b"mine", b"mine too")
    cluster.run(lambda: leader.commands)
    cluster.isolate(name)
    cluster.drop_message = lambda _sender, _to, _message: False
    assert behind(cluster) == name
    assert not any(future.done() for future in futures)
    cluster.heal()
    cluster.converge()
    assert [future.result(0) for future in futures] == [1, 2]
    assert leader.commands[:2] == [b"mine", b"mine too"]


def test_a_future_that_was_given_up_does_not_stop_the_node(clock: Clock) -> None:
    driven = member(clock)
    driven.lead()
    [future] = driven.propose(b"x")
    assert future.cancel()
    driven.step()
    commit_of(driven, 3)
    assert driven.commands == [b"x"]


def test_futures_fail_when_the_node_stops(clock: Clock) -> None:
    """B14 of PySyncObj; nobody knows then what becomes of the commands."""
    driven = member(clock)
    driven.lead()
    futures = driven.propose(b"sent")
    driven.step()
    futures += driven.propose(b"waiting")
    driven.node.proposals.close(rt.Closed("the end"))
    for future in futures:
        assert isinstance(future.exception(0), rt.Closed)
    with pytest.raises(rt.Closed):
        driven.propose(b"late")


def test_what_a_peer_wants_appended_must_mean_something(clock: Clock) -> None:
    """A malformed entry would stop every node; C1 of PySyncObj."""
    driven = member(clock)
    driven.lead()
    last = driven.log.last
    driven.hear("n2", Forward(b"garbage"), Forward(b""), Forward(b"\x02\x80\x04."))
    assert driven.log.last == last
    driven.hear("n2", Forward(encode_commands(disk_id("n2"), 1, 1, 1, [b"fine"])))
    assert driven.log.last.index == last.index + 1


def test_a_node_with_nothing_to_do_waits(clock: Clock) -> None:
    """Also with commands that it cannot get rid of: no leader, or as much in flight as may be."""
    driven = member(clock)
    driven.append(2, INITIAL)
    driven.propose(*[bytes(PACK_BYTES)] * (PACKS_MAX + 4))
    driven.step()
    assert driven.node.wait_s() > 0
    driven.wire.drop("n2")
    driven.step()
    driven.time_out()
    assert driven.raft.leader is None
    clock.advance(driven.config.retry_ms / 1000)
    driven.step()
    assert driven.node.wait_s() > 0


# --- Which disks count: rule 6 ---------------------------------------------------------------------------


def test_blank_members_make_one_cluster(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"x")
    cluster.converge()
    assert {member.status.cluster for member in cluster.members.values()} == {b"made by n1      ".hex()}
    assert all(member.status.epoch == 1 for member in cluster.members.values())


def test_a_cluster_is_made_only_when_all_members_are_there(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.kill("n3")
    cluster.idle(3)
    assert [member.status.role for member in cluster.members.values()] == ["joining", "joining"]
    cluster.start("n3")
    cluster.commit(b"x")


def test_a_member_that_missed_the_beginning_is_counted_on_from_the_start(clock: Clock) -> None:
    """Its blank disk was there when the cluster was made: it takes the leader's snapshot, without a join."""
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


def test_a_cluster_is_made_only_if_a_member_has_bootstrap_set(clock: Clock) -> None:
    cluster = Lockstep(clock, bootstrap=False)
    cluster.idle(3)
    assert {member.status.role for member in cluster.members.values()} == {"joining"}
    cluster.restart("n2", bootstrap=True)
    cluster.commit(b"x")


def test_no_cluster_is_made_where_one_is(clock: Clock) -> None:
    """Two of three were wiped, and all are told to make a cluster: nothing is admitted, nothing committed."""
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
def test_a_cluster_is_made_once_wherever_the_power_goes(clock: Clock, name: str, keep: Keep) -> None:
    """n1 makes it, n3 takes it over: each step is durable before the next."""
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
    """A wiped member: its disk is of the second generation, the cluster counts on the first."""
    driven = Driven(clock, config_of("n1", NAMES[:3]), generation=1)
    driven.up()
    driven.step()
    driven.step()
    return driven


def test_a_wiped_disk_neither_votes_nor_stands(clock: Clock) -> None:
    driven = blank(clock)
    for term in (2, 3):
        for pre in (True, False):
            reply = driven.request_vote("n2", term, LogIndex(9, 9), pre=pre)
            assert reply is None or not reply.granted
    assert of_kind(driven.time_out(), RequestVote) == []
    assert driven.raft.role == "follower"


def test_a_wiped_disk_votes_once_it_has_applied_its_join(clock: Clock) -> None:
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
def test_what_another_disk_says_does_not_count(clock: Clock, kind: str) -> None:
    """Neither its support, nor its vote, nor its acknowledgement, nor its signs of life."""
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


def test_a_candidate_on_a_disk_that_was_replaced_gets_no_answer(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [RaftEntry(encode_join(JoinEntry("n3", disk_id("n3", 1))), 2, 2)], commit=1)
    clear_leader(driven)
    assert driven.request_vote("n3", 9, LogIndex(9, 9)) is None
    assert driven.raft.term == 2
    reply = driven.request_vote("n3", 9, LogIndex(9, 9), claim=claim_of("n3", 1, LogIndex(2, 2)))
    assert reply is not None
    assert reply.granted


def test_a_join_counts_from_where_it_stands_in_the_log_even_before_it_is_committed(clock: Clock) -> None:
    """The disk that says it has applied that join proves that it is committed; the former disk is out."""
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
def test_a_blank_disk_is_offered_only_a_snapshot_that_knows_of_its_join(
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


def test_a_join_that_was_cut_counts_no_more(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, [RaftEntry(encode_join(JoinEntry("n3", disk_id("n3", 1))), 2, 2)], commit=1)
    driven.append(3, INITIAL, entries_of([3]), commit=1, peer="n3")
    clear_leader(driven)
    reply = driven.request_vote("n3", 4, LogIndex(2, 3))
    assert reply is not None
    assert reply.granted


def test_a_join_asked_for_twice_stands_where_it_stood_first(clock: Clock) -> None:
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


def test_a_wiped_disk_is_admitted_and_counts_from_then_on(clock: Clock) -> None:
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


def test_a_join_needs_a_majority_without_the_disk_that_joins(clock: Clock) -> None:
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
def test_a_joined_disk_still_counts_when_all_lost_power_and_one_stays_dead(
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


def test_the_former_disk_of_a_member_is_admitted_like_any_other(clock: Clock) -> None:
    """It counts for nothing before; what it has is not lost on it."""
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


def test_disks_may_take_turns(clock: Clock) -> None:
    """The same disk is admitted as often as it comes back, under one leader too."""
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


def test_peers_of_another_cluster_are_neither_heard_nor_told_anything(clock: Clock) -> None:
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


def test_a_leader_sends_a_stranger_nothing(clock: Clock) -> None:
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
def test_a_node_leaves_its_epoch_for_a_later_one_only_with_a_majority(clock: Clock, epoch: int) -> None:
    """Another epoch is refused; who meets a majority of a higher one leaves its own."""
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
def test_a_malformed_first_snapshot_is_refused(clock: Clock, content: bytes, is_blank: bool) -> None:
    driven = Driven(clock, config_of("n1", NAMES[:3]))
    if not is_blank:
        driven.adopt()
    driven.up("n2", cluster=CLUSTER)
    driven.hear("n2", Admit(content))
    assert driven.status.cluster == ("" if is_blank else CLUSTER.hex())


def test_a_first_snapshot_for_another_disk_is_refused(clock: Clock) -> None:
    driven = Driven(clock, config_of("n1", NAMES[:3]))
    driven.up("n2")
    others = {"n1": disk_id("n1", 5), "n2": disk_id("n2"), "n3": disk_id("n3")}
    driven.hear("n2", Admit(encode_state(initial_state(CLUSTER, 1, others))))
    assert driven.status.cluster == ""


def test_a_member_does_not_change_clusters(clock: Clock) -> None:
    driven = member(clock)
    disks = {name: disk_id(name) for name in NAMES[:3]}
    driven.hear("n2", Admit(encode_state(initial_state(b"another cluster!", 1, disks))))
    assert driven.status.cluster == CLUSTER.hex()


# --- Replicas that differ --------------------------------------------------------------------------------


def diverged(clock: Clock) -> tuple[Driven, AppendEntries]:
    """A node that applied something, and an append of a leader that applied something else there."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2]), commit=2)
    driven.step()
    return driven, AppendEntries(3, LogIndex(2, 2), 2, 2, driven.node.state.chain ^ 1, ())


def test_a_node_that_differs_from_its_leader_does_not_follow(clock: Clock) -> None:
    driven, append = diverged(clock)
    assert driven.hear("n3", append) == []
    assert driven.raft.term == 2
    clear_leader(driven)
    reply = driven.request_vote("n2", 4, LogIndex(2, 2), pre=True)
    assert reply is not None
    assert reply.granted, "if it is the leader that differs, another one must be possible"


def test_a_node_that_differs_from_every_leader_stops(clock: Clock) -> None:
    driven, append = diverged(clock)
    with pytest.raises(Diverged, match="applied state differs"):
        for _ in range(1000):
            driven.hear("n3", append)
            clock.advance(0.05)


def test_a_node_that_agrees_with_the_next_leader_continues(clock: Clock) -> None:
    driven, append = diverged(clock)
    for term in range(4, 12, 2):
        sent = driven.hear("n3", append._replace(term=term))
        assert not any(isinstance(message, AppendEntriesReply) for message in sent)
        clock.advance(0.3)
        agreeing = append._replace(term=term + 1, chain=driven.node.state.chain)
        assert only(driven.hear("n2", agreeing), AppendEntriesReply).matched
        clock.advance(5)
