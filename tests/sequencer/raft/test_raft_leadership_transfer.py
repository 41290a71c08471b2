"""Leadership transfer (Ongaro's dissertation, 3.10), also with lost, late or repeated TimeoutNow.

Sections are of Ongaro's dissertation.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import pytest
from raft_bench import (
    Clock,
    Driven,
    Lockstep,
    Member,
    claim_of,
    commands_entry,
    config_of,
    disk_id,
    entries_of,
    of_kind,
)
from simulation.simulate import simulate

from sequencer.raft.core.leadership_transfer import LeadershipTransfer
from sequencer.raft.model.cluster_state import INITIAL
from sequencer.raft.model.entry_codec import encode_commands
from sequencer.raft.model.messages import (
    AppendEntries,
    Forward,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)

NAMES = ["n1", "n2", "n3", "n4", "n5"]


def member(clock: Clock, members: int = 3) -> Driven:
    driven = Driven(clock, config_of("n1", NAMES[:members]))
    driven.adopt()
    return driven


def leader(clock: Clock, members: int = 3) -> Driven:
    """Return a leader with a log that no other member has acknowledged."""
    driven = member(clock, members)
    driven.lead()
    return driven


def begin(node: Member, seconds: float = 1.0) -> Future[bool]:
    done: Future[bool] = Future()
    node.node.transfers.start(seconds, done)
    return done


# --- Choice of the member --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matched", "called"),
    [
        ({}, None),
        ({"n2": 6, "n3": 5}, None),
        ({"n2": 6, "n3": 7}, "n3"),
        ({"n2": 7, "n3": 7}, "n3"),
        ({"n2": 7}, "n2"),
    ],
)
def test_transfer_chooses_member_with_whole_log_only_once(
    matched: dict[str, int], called: str | None
) -> None:
    wish = LeadershipTransfer(until=1.0)
    assert wish.choose(matched, 7) == called
    assert wish.choose({"n2": 7, "n3": 7}, 7) == (None if called else "n3")
    assert wish.choose({"n2": 7, "n3": 7}, 7) is None


# --- A leader that transfers leadership: section 3.10 ----------------------------------------------------


def test_leader_sends_timeout_now_after_member_acknowledges_whole_log(clock: Clock) -> None:
    driven = leader(clock)
    begin(driven)
    assert of_kind(driven.step(), TimeoutNow) == []
    last = driven.log.last.index
    assert of_kind(driven.acknowledge("n2", last - 1), TimeoutNow) == []
    sent = driven.acknowledge("n3", last)
    assert [(peer, message) for peer, message in sent if isinstance(message, TimeoutNow)] == [
        ("n3", TimeoutNow(driven.raft.term))
    ]


def test_leader_sends_timeout_now_to_only_one_member(clock: Clock) -> None:
    driven = leader(clock)
    begin(driven)
    sent = [message for peer in ("n2", "n3") for message in driven.acknowledge(peer, driven.log.last.index)]
    assert len(of_kind(sent, TimeoutNow)) == 1


def test_uncounted_disk_gets_no_timeout_now(clock: Clock) -> None:
    driven = leader(clock)
    begin(driven)
    sent = driven.acknowledge("n2", driven.log.last.index, claim=claim_of("n2", generation=1))
    assert of_kind(sent, TimeoutNow) == []


def test_proposed_and_forwarded_commands_wait_until_transfer_fails(clock: Clock) -> None:
    driven = leader(clock)
    done = begin(driven, 0.2)
    (future,) = driven.propose(b"own")
    forwarded = encode_commands(disk_id("n2"), 1, 1, 1, [b"other's"])
    last = driven.log.last
    driven.hear("n2", Forward(forwarded))
    assert driven.log.last == last
    assert driven.node.wait_s() > 0
    clock.advance(0.201)
    driven.step()
    driven.step()
    assert done.result(0) is False
    assert driven.raft.role == "leader"
    assert [content for _, _, content in driven.contents()[-2:]] == [b"other's", b"own"]
    for peer in ("n2", "n3"):
        driven.acknowledge(peer, driven.log.last.index)
    assert future.result(0) == 2


def test_leader_sends_heartbeats_and_commits_during_transfer(clock: Clock) -> None:
    driven = leader(clock)
    begin(driven)
    driven.step()
    driven.acknowledge("n2", driven.log.last.index)
    driven.step()
    assert driven.status.committed == driven.log.last.index
    clock.advance(driven.config.heartbeat_ms / 1000 + 0.001)
    assert len(of_kind(driven.step(), AppendEntries)) == 2


def test_leader_grants_vote_to_candidate_it_sent_timeout_now(clock: Clock) -> None:
    driven = leader(clock)
    done = begin(driven)
    driven.acknowledge("n2", driven.log.last.index)
    term = driven.raft.term + 1
    request = RequestVote(term, driven.log.last, claim_of("n2"), pre=False, called=True)
    assert RequestVoteReply(term, True, driven.node.claim, False) in driven.hear("n2", request)
    assert driven.raft.role == "follower"
    assert not done.done()
    driven.hear("n2", AppendEntries(term, driven.log.last, 0, 0, 0, ()))
    assert done.result(0) is True


def test_leader_refuses_vote_request_without_timeout_now(clock: Clock) -> None:
    driven = leader(clock)
    assert driven.request_vote("n2", driven.raft.term + 1, driven.log.last) is None
    assert driven.raft.role == "leader"


def test_transfer_on_non_leader_returns_at_once_whether_leader_is_known(clock: Clock) -> None:
    driven = member(clock)
    assert begin(driven).result(0) is False
    driven.append(2, INITIAL)
    assert begin(driven).result(0) is True


def test_single_node_continues_leading_after_transfer_fails(clock: Clock) -> None:
    cluster = Lockstep(clock, ["n1"])
    alone = cluster.lead()
    done = begin(alone, 0.1)
    cluster.run(done.done)
    assert done.result(0) is False
    assert cluster.commit(b"next") == [1]


def test_wait_of_idle_loop_ends_at_transfer_deadline(clock: Clock) -> None:
    driven = leader(clock)
    begin(driven, 0.01)
    driven.step()
    assert driven.node.wait_s() <= 0.01


# --- A member that receives TimeoutNow -------------------------------------------------------------------


def follower(clock: Clock) -> Driven:
    """Return a follower of n2 in term 3 with all of n2's log."""
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([2, 3]), commit=3)
    return driven


def requests(sent: list[tuple[str, Message]]) -> Counter[str]:
    return Counter(peer for peer, message in sent if isinstance(message, RequestVote) and message.called)


def test_timeout_now_starts_election_without_pre_vote(clock: Clock) -> None:
    driven = follower(clock)
    sent = driven.hear_all("n2", TimeoutNow(3))
    assert (driven.raft.role, driven.raft.term) == ("candidate", 4)
    assert (
        of_kind(sent, RequestVote)
        == [RequestVote(4, driven.log.last, driven.node.claim, pre=False, called=True)] * 2
    )


def test_heartbeat_after_timeout_now_does_not_cancel_election(clock: Clock) -> None:
    driven = follower(clock)
    driven.hear("n2", TimeoutNow(3), AppendEntries(3, driven.log.last, 3, 0, 0, ()))
    assert (driven.raft.role, driven.raft.term) == ("candidate", 4)


@pytest.mark.parametrize(
    ("peer", "term"),
    [("n3", 3), ("n2", 2), ("n2", 4), ("n3", 4)],
    ids=["of no leader", "late", "early", "of a later leader that was not heard"],
)
def test_timeout_now_of_wrong_sender_or_term_is_ignored(clock: Clock, peer: str, term: int) -> None:
    driven = follower(clock)
    driven.hear(peer, TimeoutNow(term))
    assert (driven.raft.role, driven.raft.term, driven.raft.leader) == ("follower", 3, "n2")


def test_repeated_timeout_now_starts_only_one_election(clock: Clock) -> None:
    driven = follower(clock)
    sent = driven.hear_all("n2", TimeoutNow(3), TimeoutNow(3))
    sent += driven.hear_all("n2", TimeoutNow(3))
    assert requests(sent) == {"n2": 1, "n3": 1}
    assert driven.raft.term == 4


def test_failed_transfer_election_is_followed_by_ordinary_pre_vote(clock: Clock) -> None:
    driven = follower(clock)
    driven.hear("n2", TimeoutNow(3))
    sent = of_kind(driven.time_out(), RequestVote)
    assert sent
    assert all(request.pre and not request.called for request in sent)


def test_wiped_member_ignores_timeout_now(clock: Clock) -> None:
    driven = Driven(clock, config_of("n1", NAMES[:3]), generation=1)
    driven.adopt({"n1": 1})
    driven.append(3, INITIAL, [join_of_another_disk()], commit=1)
    assert not driven.raft.is_counted_here
    driven.hear("n2", TimeoutNow(3))
    assert (driven.raft.role, driven.raft.term) == ("follower", 3)


def join_of_another_disk() -> RaftEntry:
    from sequencer.raft.model.entry_codec import JoinEntry, encode_join

    return RaftEntry(encode_join(JoinEntry("n1", disk_id("n1", 2))), 2, 3)


def test_transfer_candidate_with_incomplete_log_gets_no_vote(clock: Clock) -> None:
    driven = member(clock)
    driven.append(3, INITIAL, [commands_entry(2, 3, b"one")], peer="n3")
    request = RequestVote(4, INITIAL, claim_of("n2"), pre=False, called=True)
    assert [m for m in driven.hear("n2", request) if isinstance(m, RequestVoteReply) and m.granted] == []


# --- A cluster -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [NAMES[:3], NAMES])
def test_repeated_transfers_commit_every_command_once(clock: Clock, names: list[str]) -> None:
    cluster = Lockstep(clock, names)
    cluster.lead()
    futures = []
    for turn in range(6):
        old = cluster.lead()
        futures += [
            future
            for name in names
            for future in cluster.members[name].propose(b"%d %b" % (turn, name.encode()))
        ]
        done = begin(old)
        before = clock.now
        cluster.run(done.done)
        assert done.result(0) is True
        assert clock.now - before < old.config.election_ms_min / 1000
        assert cluster.lead() is not old
    cluster.run(lambda: all(future.done() for future in futures))
    cluster.converge()
    assert sorted(future.result(0) for future in futures) == list(range(1, len(futures) + 1))


def test_leader_continues_if_every_timeout_now_is_lost(clock: Clock) -> None:
    cluster = Lockstep(clock)
    old = cluster.lead()
    cluster.drop_message = lambda _one, _two, message: isinstance(message, TimeoutNow)
    term, done = old.raft.term, begin(old, 0.5)
    (future,) = old.propose(b"waits")
    cluster.run(done.done)
    assert done.result(0) is False
    cluster.run(future.done)
    assert (cluster.lead().name, old.raft.term) == (old.name, term)


def test_transfer_succeeds_while_one_follower_is_missing_an_entry(clock: Clock) -> None:
    cluster = Lockstep(clock)
    old = cluster.lead()
    cluster.converge()
    others = [name for name in cluster.names if name != old.name]
    cluster.cut((old.name, others[0]))
    cluster.commit(b"missed by one", via=old.name)
    cluster.heal()
    done = begin(old)
    cluster.run(done.done)
    assert done.result(0) is True
    cluster.converge()


def test_simulation_covers_transfers_and_finds_no_violation() -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        seen += simulate(
            seed, nodes=3, seconds=4.0, faults={"hand_over": 2, "kill": 1, "cut_off": 1}, fault_every_s=0.1
        ).seen
    assert {
        "hand_over",
        "leadership_transfer_started",
        "timeout_now_received",
        "leadership_transfer_failed",
    } <= set(seen)
