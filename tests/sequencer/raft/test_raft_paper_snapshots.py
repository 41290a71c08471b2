"""Snapshots and client commands of Raft: install, transfer, compaction, proposals and their futures.

Sections are those of Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm", extended
version of 2014; "dissertation" is Ongaro's of the same year. Rule n is of docs/raft.md.
"""

from __future__ import annotations

import pytest
from disks import Keep, PowerCut
from paper_members import AFTER, Snapshot, commit_of, member
from raft_bench import (
    DIRECTORY,
    Clock,
    Driven,
    Lockstep,
    config_of,
    disk_id,
    entries_of,
)

import rt
from rt.errors import Corrupt, Overloaded
from sequencer.raft.lifecycle.snapshotter import LONGEST_S, has_grown
from sequencer.raft.model.cluster_state import INITIAL
from sequencer.raft.model.entry_codec import (
    PACK_BYTES,
    decode_content,
    encode_commands,
)
from sequencer.raft.model.messages import (
    COMMAND_BYTES_MAX,
    AppendEntries,
    Forward,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    Message,
)
from sequencer.raft.proposals import PACKS_MAX

# --- Snapshots: section 7, rule 3 ------------------------------------------------------------------------


@pytest.mark.parametrize("keep", AFTER)
def test_installed_snapshot_replaces_log(clock: Clock, keep: Keep | None) -> None:
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


def test_installed_snapshot_keeps_matching_entries_after_it(clock: Clock) -> None:
    """Figure 13: if an entry has the index and term of the snapshot's last entry, the entries after it are
    retained.
    """
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2, 2]), commit=1)
    driven.hear("n2", *Snapshot(entries_of([2, 2, 2])).chunks(2))
    driven.step()
    assert (driven.status.applied, driven.log.last) == (4, LogIndex(6, 2))
    assert driven.append(2, LogIndex(6, 2), commit=6).index == 6
    driven.step()
    assert driven.commands == [b"2/2", b"3/2", b"4/2", b"5/2", b"6/2"]


def test_installed_snapshot_discards_conflicting_log(clock: Clock) -> None:
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2, 2]), commit=1)
    snapshot = Snapshot(entries_of([3, 3, 3], tag=b"other"))
    driven.hear("n3", *snapshot.chunks(3))
    driven.step()
    assert (driven.log.base, driven.terms(), driven.commands) == (LogIndex(4, 3), [], snapshot.commands)


def test_old_snapshot_does_not_roll_back_committed_entries(clock: Clock) -> None:
    """B7 of PySyncObj."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2, 2, 2, 2]), commit=6)
    driven.step()
    snapshot = Snapshot(entries_of([2, 2]))
    [reply] = driven.hear("n2", snapshot.chunk(2, 0, 50))
    length = len(snapshot.content)
    assert reply == InstallSnapshotReply(2, snapshot.place, 50, length, True, driven.node.claim)
    assert (driven.status.applied, len(driven.commands), driven.status.snapshot) == (6, 5, 1)


def test_snapshot_install_does_not_roll_back_log_applied_meanwhile(clock: Clock) -> None:
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


def test_repeated_and_early_snapshot_chunks_are_ignored(clock: Clock) -> None:
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


def test_snapshot_with_wrong_content_is_not_installed(clock: Clock) -> None:
    """A7 of PySyncObj; the correct snapshot is installed when it arrives."""
    driven = member(clock)
    snapshot = Snapshot(entries_of([2, 2, 2]))
    *chunks, last = snapshot.chunks(2)
    driven.hear("n2", *chunks, last._replace(data=bytes(len(last.data))))
    driven.step()
    assert (driven.status.applied, driven.status.snapshot, driven.commands) == (1, 1, [])
    driven.hear("n2", *snapshot.chunks(2))
    driven.step()
    assert driven.commands == snapshot.commands


def test_snapshot_transfer_starts_again_after_restart(clock: Clock) -> None:
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


def test_newer_snapshot_replaces_partial_one(clock: Clock) -> None:
    """This includes the snapshot of another leader."""
    driven = member(clock)
    driven.hear("n2", Snapshot(entries_of([2, 2])).chunk(2, 0, 100))
    newer = Snapshot(entries_of([2, 2, 3]))
    driven.hear("n3", *newer.chunks(3))
    driven.step()
    assert (driven.commands, driven.raft.leader) == (newer.commands, "n3")


def test_next_leader_continues_transfer_of_same_snapshot(clock: Clock) -> None:
    driven = member(clock)
    snapshot = Snapshot(entries_of([2, 2, 2]))
    driven.hear("n2", snapshot.chunk(2, 0, 100))
    [reply] = driven.hear("n3", snapshot.chunk(3, 0, 100))
    assert isinstance(reply, InstallSnapshotReply)
    assert (reply.term, reply.offset) == (3, 100)
    driven.hear("n3", snapshot.chunk(3, 100, len(snapshot.content)))
    driven.step()
    assert driven.commands == snapshot.commands


def test_follower_replies_without_match_during_snapshot_install(clock: Clock) -> None:
    """The reply lets the leader stay leader, but acknowledges nothing."""
    driven = member(clock)
    driven.worker.is_held = True
    snapshot = Snapshot(entries_of([2, 2, 2]))
    driven.hear("n2", *snapshot.chunks(2))
    for _ in range(3):
        reply = driven.append(2, snapshot.place, commit=4)
        assert (reply.matched, reply.index) == (False, 1)
    assert driven.status.applied == 1


def test_abandoned_snapshot_transfer_does_not_prevent_own_snapshots(clock: Clock) -> None:
    driven = member(clock, snapshot_ms=100)
    driven.hear("n2", Snapshot(entries_of([2, 2])).chunk(2, 0, 100))
    driven.append(3, INITIAL, entries_of([2, 2, 2]), commit=4, peer="n3")
    for _ in range(4):
        clock.advance(0.1)
        driven.step()
    assert driven.status.snapshot == 4


MIB = 1 << 20


@pytest.mark.parametrize(
    ("state_bytes", "log_bytes", "entries", "is_due"),
    [
        (0, 0, 0, True),
        (MIB, 1, 1, True),  # A small state is written after any change.
        (MIB + 1, MIB // 4, 1, False),
        (MIB + 4, MIB // 4 + 1, 1, True),
        (100 * MIB, 25 * MIB - 1, 1, False),
        (100 * MIB, 25 * MIB, 1, True),
        (1000 * MIB, 32 * MIB, 1, True),  # A starting node replays no more bytes than the log may keep,
        (100 * MIB, 1, 16 * 4096, True),  # and no more entries than it can apply in seconds.
        (100 * MIB, 1, 16 * 4096 - 1, False),
    ],
)
def test_snapshot_is_due_when_log_has_grown_by_share_of_state_size(
    state_bytes: int, log_bytes: int, entries: int, is_due: bool
) -> None:
    assert has_grown(state_bytes, log_bytes, entries, config_of("n1", ["n1"])) is is_due


def test_large_state_is_snapshotted_again_after_log_growth_or_long_time(clock: Clock) -> None:
    driven = member(clock, snapshot_ms=100)

    def take(index: int, size: int, wait_s: float = 0.2) -> int | None:
        """Apply a command of that size, wait, and return what the newest snapshot covers."""
        prev = INITIAL if index == 2 else LogIndex(index - 1, 2)
        driven.append(2, prev, entries_of([2], index, b"x" * size), commit=index)
        for _ in range(2):
            clock.advance(wait_s)
            driven.step()
        return driven.status.snapshot

    assert take(2, MIB // 2) == 2
    assert take(3, MIB - 100) == 3  # The state was small until now.
    assert take(4, 100) == 3
    assert take(5, MIB // 4) == 3
    assert take(6, MIB // 4) == 6
    assert take(7, 100) == 6
    driven = driven.reopened(snapshot_ms=100)
    driven.append(3, LogIndex(7, 2), entries_of([3], 8), commit=8)
    for passed_s, covered in ((LONGEST_S / 2, 6), (LONGEST_S, 8)):
        clock.advance(passed_s)
        driven.append(3, LogIndex(8, 3), commit=8)  # Meanwhile the leader is in contact.
        assert driven.status.snapshot == covered


@pytest.mark.parametrize("keep", ["all", "none", "some"])
def test_snapshot_install_leaves_old_or_new_state_after_power_cut(clock: Clock, keep: Keep) -> None:
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


def test_corrupt_snapshot_raises_corrupt_at_start(clock: Clock) -> None:
    """Rule 3; A7 of PySyncObj, which continued with an empty state."""
    driven = member(clock)
    driven.hear("n2", *Snapshot(entries_of([2, 2, 2])).chunks(2))
    driven.step()
    driven.disk.flip_bit(f"{DIRECTORY}/snapshot.4", 150, 3)
    with pytest.raises(Corrupt):
        driven.reopened()


def behind(cluster: Lockstep, commands: int = 30) -> str:
    """Cut a follower off until no log contains the entries that it misses. Return its name."""
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    cluster.isolate(name)
    while leader.log.base.index <= cluster.members[name].log.last.index:
        for one in cluster.members.values():
            one.log._segment_bytes = 1000
        cluster.commit(*[b"%d" % at * 100 for at in range(commands)], via=leader.name)
        cluster.idle(0.15)
    return name


def test_follower_with_large_lag_receives_snapshot_and_then_log(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1)
    name = behind(cluster)
    assert cluster.lead().name != name
    cluster.heal()
    cluster.converge()
    assert cluster.members[name].log.base.index > 1
    cluster.commit(b"more", via=name)
    cluster.converge()


def test_snapshot_transfer_is_repeated_after_corrupt_chunk(clock: Clock) -> None:
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


def test_lost_snapshot_chunks_and_replies_are_sent_again(clock: Clock) -> None:
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


def test_leader_remains_leader_while_its_only_follower_installs_snapshot(clock: Clock) -> None:
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


def test_compaction_keeps_log_tail_for_slow_followers(clock: Clock) -> None:
    """docs/raft.md, rule 3."""
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=20)
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    cluster.isolate(name)
    for one in cluster.members.values():
        one.log._segment_bytes = 300
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


def test_commands_are_packed_into_entries_up_to_size_limit(clock: Clock) -> None:
    """A thousand small commands make few entries. Large commands do not wait for each other."""
    driven = member(clock)
    driven.lead()
    driven.propose(*[b"%d" % at for at in range(1000)])
    driven.step()
    assert driven.log.last.index == 3
    driven.propose(*[bytes(PACK_BYTES // 2)] * 5, bytes(COMMAND_BYTES_MAX))
    driven.step()
    sizes = [len(decode_content(entry.content).commands) for entry in driven.log.entries(4)]
    assert sizes == [2, 2, 1, 1]


def test_command_beyond_in_flight_limit_raises_overloaded_and_is_not_applied(clock: Clock) -> None:
    driven = member(clock, commands_max=3)
    driven.lead()
    driven.propose(b"a", b"b", b"c")
    with pytest.raises(Overloaded):
        driven.propose(b"d")
    driven.step()
    commit_of(driven, driven.log.last.index)
    assert driven.commands == [b"a", b"b", b"c"]
    driven.propose(b"d")


def test_command_above_maximum_size_raises_message_too_large(clock: Clock) -> None:
    driven = member(clock)
    with pytest.raises(rt.MessageTooLarge):
        driven.propose(bytes(COMMAND_BYTES_MAX + 1))
    driven.propose(bytes(COMMAND_BYTES_MAX))


def test_commands_of_one_node_are_applied_once_in_order_across_leader_restarts(clock: Clock) -> None:
    """Each command is applied once, and each future returns the index of its command."""
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


def test_retried_command_is_applied_once(clock: Clock) -> None:
    """Section 8: the leader may die after it committed and before it answered."""
    cluster = Lockstep(clock, retry_ms=50)
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    # The proposer learns of no commit for a while, so it proposes the command again and again.
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


def test_lost_command_is_applied_before_later_ones(clock: Clock) -> None:
    cluster = Lockstep(clock, retry_ms=1_000_000)  # The retry timer does not bring it back.
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


def test_futures_complete_when_snapshot_covers_their_commands(clock: Clock) -> None:
    """B14 of PySyncObj: their callbacks were never called."""
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


def test_cancelled_future_does_not_stop_node(clock: Clock) -> None:
    driven = member(clock)
    driven.lead()
    [future] = driven.propose(b"x")
    assert future.cancel()
    driven.step()
    commit_of(driven, 3)
    assert driven.commands == [b"x"]


def test_futures_fail_with_closed_when_proposals_close(clock: Clock) -> None:
    """B14 of PySyncObj; the outcome of the commands is unknown then."""
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


def test_malformed_forwarded_commands_are_not_appended(clock: Clock) -> None:
    """A malformed entry would stop every node; C1 of PySyncObj."""
    driven = member(clock)
    driven.lead()
    last = driven.log.last
    driven.hear("n2", Forward(b"garbage"), Forward(b""), Forward(b"\x02\x80\x04."))
    assert driven.log.last == last
    driven.hear("n2", Forward(encode_commands(disk_id("n2"), 1, 1, 1, [b"fine"])))
    assert driven.log.last.index == last.index + 1


def test_idle_node_waits_even_with_commands_it_cannot_send(clock: Clock) -> None:
    """This includes commands that it cannot send: without a leader, or with the maximum in flight."""
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
