"""Messages of faulty or hostile peers: invalid terms, indexes, entries and disks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from disks import MemoryDisk
from raft_bench import (
    CLUSTER,
    Clock,
    Driven,
    claim_of,
    config_of,
    disk_id,
    entries_of,
    of_kind,
    only,
)
from raft_members import NAMES, member, reconnect

from rt.errors import Diverged, FormatError
from sequencer.raft.core.core import TERMS_AHEAD_MAX
from sequencer.raft.model.cluster_state import INITIAL, encode_state
from sequencer.raft.model.entry_codec import (
    PACKS_MAX,
    JoinEntry,
    encode_commands,
    encode_join,
)
from sequencer.raft.model.messages import (
    AppendEntries,
    AppendEntriesReply,
    Forward,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
)
from sequencer.raft.transport.codec import decode, encode
from sequencer.raft.transport.frames import FRAME_HEADER_BYTES, decode_header


@pytest.mark.parametrize(
    "nonsense",
    [
        AppendEntriesReply(0, False, 1, 1, claim_of("n2")),
        RequestVoteReply(0, False, claim_of("n2"), False),
        AppendEntries(0, INITIAL, 1, 0, 0, ()),
        InstallSnapshot(0, LogIndex(9, 2), 4, bytes(32), 0, b"data"),
        InstallSnapshotReply(0, LogIndex(9, 2), 0, 0, False, claim_of("n2")),
        RequestVote(0, LogIndex(9, 9), claim_of("n2"), False),
    ],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("term", [2**63 - 1, TERMS_AHEAD_MAX + 3])
def test_message_with_term_far_ahead_is_ignored(clock: Clock, nonsense: Any, term: int) -> None:
    """V7: the node adopted and stored the greatest term, so no candidate could ever use a later one."""
    driven = member(clock)
    own = driven.lead()
    driven.hear("n2", nonsense._replace(term=term))
    assert (driven.raft.term, driven.log.term, driven.raft.role) == (own, own, "leader")
    again = driven.reopened()
    again.hear("n2", nonsense._replace(term=term))
    assert again.lead() == own + 1


@pytest.mark.parametrize(
    "message",
    [
        InstallSnapshot(2, LogIndex(50, 3), 4, bytes(32), 0, b"data"),
        RequestVote(2, LogIndex(9, 3), claim_of("n2"), pre=True),
    ],
    ids=lambda message: type(message).__name__,
)
def test_message_with_log_index_of_later_term_raises_format_error(message: Message) -> None:
    """V22: a chunk with a small term contained a snapshot index with the greatest term, and the node adopted
    that term.
    """
    frame = b"".join(encode(message, 1))
    with pytest.raises(FormatError, match="term"):
        decode(decode_header(frame).kind, frame[FRAME_HEADER_BYTES:])


def test_leader_replacing_its_own_entries_raises_diverged_on_follower(clock: Clock) -> None:
    """V22: the commit index passed the end of the log, the loop never waited, and later entries were
    committed.
    """
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([3, 3, 3, 3]), commit=1)
    with pytest.raises(Diverged, match="replaced its own entries"):
        driven.append(3, INITIAL, entries_of([2, 2]), commit=5)


def test_second_leader_in_same_term_raises_diverged_on_follower(clock: Clock) -> None:
    """V22: only a leader noticed it. A follower changed to the other leader, and cut entries that it had
    acknowledged.
    """
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([3]), commit=1, peer="n2")
    with pytest.raises(Diverged, match="two leaders"):
        driven.append(3, INITIAL, entries_of([3], tag=b"other"), commit=1, peer="n3")


def _pack(disk: bytes, run: int, sequence: int, floor: int) -> bytes:
    """Return a pack's bytes, including packs that `encode_commands` refuses to make."""
    content = bytearray(encode_commands(disk, run, 1, 1, [b"forged"]))
    content[32:48] = sequence.to_bytes(8, "little") + floor.to_bytes(8, "little")
    return bytes(content)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(encode_join(JoinEntry("n3", disk_id("nobody"))), id="join"),
        pytest.param(_pack(disk_id("n3"), 2**62, 1, 1), id="disk of another member"),
        pytest.param(_pack(disk_id("n2", 1), 1, 1, 1), id="disk of nobody"),
        pytest.param(_pack(disk_id("n2"), 5, 1 + PACKS_MAX, 1), id="wide window"),
    ],
)
def test_leader_appends_only_forwarded_commands_of_peers_own_disk(clock: Clock, content: bytes) -> None:
    """V6: joins displaced every disk, forged packs blocked a member, and a floor of 1 kept outcomes
    indefinitely.
    """
    driven = member(clock)
    driven.lead()
    last = driven.log.last
    driven.hear("n2", Forward(content))
    assert driven.log.last == last
    driven.hear("n2", Forward(_pack(disk_id("n2"), 5, PACKS_MAX, 1)))
    assert driven.log.last.index == last.index + 1


def test_copied_disk_with_commands_of_later_run_raises_diverged(clock: Clock) -> None:
    """V6: its proposals were no-ops indefinitely, and were proposed again as fast as they were committed."""
    driven = member(clock)
    driven.append(2, INITIAL)
    driven.propose(b"mine")
    own = only(driven.hear("n2"), Forward).content
    other = encode_commands(disk_id("n1"), 99 << 32, 1, 1, [b"another run's"])
    with pytest.raises(Diverged, match="another node uses a copy"):
        driven.append(2, INITIAL, [RaftEntry(other, 2, 2), RaftEntry(own, 3, 2)], commit=3)


def test_rolled_back_disk_with_repeated_sequences_raises_diverged(clock: Clock) -> None:
    """V12: its run and its sequences were repeated, and its commands were no-ops indefinitely."""
    driven = member(clock)
    packs = [encode_commands(disk_id("n1"), driven.node.proposals._run, at, 1, [b"former"]) for at in (1, 2)]
    driven.append(2, INITIAL, [RaftEntry(pack, at, 2) for at, pack in enumerate(packs, 2)], commit=3)
    driven.propose(b"mine")
    own = only(driven.hear("n2"), Forward).content
    with pytest.raises(Diverged, match="rolled back"):
        driven.append(2, LogIndex(3, 2), [RaftEntry(own, 4, 2)], commit=4)


def _replay(driven: Driven, former: Driven, entry: RaftEntry) -> None:
    driven.append(2, former.log.base, [entry], commit=2)
    driven.step()


def _install(driven: Driven, former: Driven, _entry: RaftEntry) -> None:
    content = encode_state(former.node.state) + former.machine.snapshot()()
    place, digest = former.node.state.applied, hashlib.sha256(content).digest()
    driven.hear("n2", InstallSnapshot(2, place, len(content), digest, 0, content))
    driven.step()


@pytest.mark.parametrize("learn", [_replay, _install])
@pytest.mark.parametrize("draw", [b"a lower draw....", b"z higher draw..."])
def test_commands_proposed_before_disk_rollback_do_not_complete_new_ones(
    clock: Clock, learn: Callable[[Driven, Driven, RaftEntry], None], draw: bytes
) -> None:
    """X1: after a rollback of the disk, a command completed when another command with the same ordinals
    completed.
    """

    def life_on(disk: MemoryDisk, draw: bytes) -> tuple[Driven, Future[int], bytes]:
        one = Driven(clock, config_of("n1", NAMES[:3]), disk, cluster=draw)
        one.up(cluster=CLUSTER)
        one.step()
        one.append(2, INITIAL)
        [future] = one.propose(draw)
        return one, future, only(one.hear("n2"), Forward).content

    disk = member(clock).disk
    former, done, pack = life_on(disk.after_power_cut("all"), b"m draw between..")
    entry = RaftEntry(pack, 2, 2)
    former.append(2, INITIAL, [entry], commit=2)
    former.step()
    assert done.result(0) == 1
    driven, future, own = life_on(disk.after_power_cut("all"), draw)
    learn(driven, former, entry)
    assert not future.done()
    if draw < b"m":
        with pytest.raises(Diverged, match="rolled back"):
            driven.append(2, LogIndex(2, 2), [RaftEntry(own, 3, 2)], commit=3)
    else:
        driven.append(2, LogIndex(2, 2), [RaftEntry(own, 3, 2)], commit=3)
        assert (future.result(0), driven.commands) == (2, [b"m draw between..", draw])


def test_disk_with_lost_acknowledged_entries_is_no_longer_counted(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """V12: its former acknowledgements still counted, and it was probed indefinitely at the same index,
    without a log line.
    """
    driven = member(clock)
    term = driven.lead()
    driven.propose(*[b"%d" % at for at in range(3)])
    driven.step()
    last = driven.log.last.index
    driven.acknowledge("n2", last)
    driven.step()
    assert driven.status.committed == last
    reconnect(driven, "n2")
    sent = driven.hear_all("n2", AppendEntriesReply(term, False, last, 1, claim_of("n2")))
    assert f"disk_lost_entries peer=n2 disk={disk_id('n2').hex()}" in caplog.text
    assert driven.raft.peer_disks.is_counted("n2") is False
    assert driven.raft.leader_role.match_index("n2") == 0
    sent += driven.hear_all("n2", AppendEntriesReply(term, False, last, 1, claim_of("n2")))
    assert [append.prev.index for append in of_kind(sent, AppendEntries, "n2") if append.entries] == [1]
    driven.propose(b"more")
    driven.step()
    driven.acknowledge("n2", last + 1)
    driven.step()
    assert driven.status.committed == last  # n1 and an unreliable disk are no majority.
    driven.acknowledge("n3", last + 1)
    driven.step()
    assert driven.status.committed == last + 1
