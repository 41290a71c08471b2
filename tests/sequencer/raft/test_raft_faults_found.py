"""What a review, a simulation and a benchmark found wrong once, each with what holds instead.

The label in each docstring is the finding's; what follows it is what went wrong.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pysyncobj.syncobj
import pytest
import raft_bench
from raft_bench import (
    CLUSTER,
    DIRECTORY,
    Clock,
    Driven,
    ListMachine,
    Lockstep,
    Member,
    SentMessage,
    claim_of,
    config_of,
    disk_id,
    entries_of,
    of_kind,
    only,
    virtual_clock,
)

from rt.cluster_epoch import epoch_of
from rt.errors import Closed, ClusterMismatch, Corrupt, DiskFull, Diverged, FormatError, StorageFailed
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from rt.testing.disk import MemoryDisk
from sequencer.raft.core import replication
from sequencer.raft.core.core import TERMS_AHEAD_MAX
from sequencer.raft.core.progress import Mode
from sequencer.raft.lifecycle.snapshotter import HOLD_FACTOR
from sequencer.raft.model.cluster_state import INITIAL, ClusterState, encode_state, initial_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import (
    PACKS_MAX,
    Commands,
    JoinEntry,
    decode_content,
    decode_join,
    encode_commands,
    encode_join,
)
from sequencer.raft.model.messages import (
    NO_ID,
    NOWHERE,
    Admit,
    AppendEntries,
    AppendEntriesReply,
    DiskClaim,
    Forward,
    Hello,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
)
from sequencer.raft.proposals import PACK_BYTES, Proposals, Route
from sequencer.raft.raft import Raft
from sequencer.raft.storage.worker import Worker
from sequencer.raft.transport.codec import FRAME_HEADER_BYTES, decode, decode_header, encode
from sequencer.raft.transport.mesh import SETUPS_MAX, TlsMesh

NAMES = ["n1", "n2", "n3", "n4", "n5"]
HOST = "127.0.0.1"


@pytest.fixture
def clock() -> Iterator[Clock]:
    with virtual_clock() as clock:
        yield clock


def member(clock: Clock, members: int = 3, **settings: Any) -> Driven:
    """A member of a new cluster, all peers connected, that has heard of nobody yet."""
    driven = Driven(clock, config_of("n1", NAMES[:members], **settings))
    driven.adopt()
    return driven


def first_state(members: list[str], **generations: int) -> bytes:
    disks = {name: disk_id(name, generations.get(name, 0)) for name in members}
    return encode_state(initial_state(CLUSTER, 1, disks))


def other_than(cluster: Lockstep, *names: str) -> str:
    return next(name for name in cluster.names if name not in names)


def joins_in(driven: Member) -> list[JoinEntry]:
    return [join for entry in driven.log[1:] if (join := decode_join(entry.content))]


def reconnect(driven: Driven, peer: str, **hello: Any) -> None:
    driven.wire.drop(peer)
    driven.step()
    driven.up(peer, **hello)
    driven.step()


# --- Membership ------------------------------------------------------------------------------------------


def test_a_node_does_not_open_with_other_members_than_its_clusters(clock: Clock) -> None:
    """V1: three nodes of which one was told of five counted two different majorities."""
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
def test_a_blank_node_takes_no_state_of_other_members_than_its_own(
    clock: Clock, give: Callable[[Driven, bytes], None]
) -> None:
    """V1: a new member of five took the state of a cluster of three, and was admitted."""
    driven = Driven(clock, config_of("n4", NAMES))
    driven.up("n3")
    give(driven, first_state(NAMES[:3], n4=0))
    give(driven, first_state([*NAMES[:4], "n6"]))
    driven.step()
    assert (driven.status.cluster, driven.status.snapshot) == ("", 0)
    give(driven, first_state(NAMES))
    driven.step()
    assert (driven.status.cluster, driven.status.snapshot) == (CLUSTER.hex(), 1)


def test_a_state_that_cannot_be_read_is_refused_before_it_counts(clock: Clock) -> None:
    """V11: a leader's snapshot got its name before anybody looked into it: the node never started again."""
    driven = member(clock)
    driven.append(2, INITIAL, entries_of([2, 2]), commit=3)
    later = b"a state of a later version"
    driven.hear(
        "n2", InstallSnapshot(2, LogIndex(50, 2), len(later), hashlib.sha256(later).digest(), 0, later)
    )
    driven.step()
    assert (driven.status.snapshot, driven.status.applied) == (1, 3)
    assert driven.reopened().append(2, LogIndex(3, 2), entries_of([2], start=4), commit=4).matched


def test_a_member_that_never_took_the_first_state_takes_a_later_one(clock: Clock) -> None:
    """S1: only the first state was offered; with another disk lost, nobody could lead any more."""
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


def test_a_late_join_of_a_dead_disk_unseats_nobody(clock: Clock) -> None:
    """P6: a join that came through a forward could be appended behind that of the live disk."""
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
    assert leader.raft.is_counted(name)


def test_a_join_is_in_the_log_or_nowhere(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: what waited when a leader was deposed went to the next one, which appended it late."""
    driven = member(clock)
    term = driven.lead()
    reconnect(driven, "n3", claims={"n3": DiskClaim(disk_id("n3", 1))})
    with monkeypatch.context() as busy:  # A round whose time is over before it comes to what waits.
        busy.setattr(pysyncobj.syncobj.SyncObj, "_checkCommandsToApply", lambda _raft: None)
        driven.step()
    assert joins_in(driven) == [JoinEntry("n3", disk_id("n3", 1))]
    sent = driven.hear_all("n2", AppendEntries(term + 1, INITIAL, 1, 0, 0, entries_of([term + 1])))
    assert (driven.raft.leader, joins_in(driven)) == ("n2", [])
    assert of_kind(sent + driven.step() + driven.step(), Forward) == []


def test_a_disk_whose_claims_change_all_the_time_costs_a_join_an_election_timeout(clock: Clock) -> None:
    """V28: each disk was asked for once in a term; without that bound, each message could cost an entry."""
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


def test_a_stranger_met_while_blank_stays_a_stranger(clock: Clock) -> None:
    """V13: it counted as connected after the adoption, was sent our entries, and its disk was admitted."""
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


def test_one_peer_alone_does_not_say_that_the_cluster_was_reset(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """V19: one hello of a higher epoch ended every node that it reached, in every run."""
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


# --- What peers may say ----------------------------------------------------------------------------------


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
def test_no_message_takes_the_terms_near_their_end(clock: Clock, nonsense: Any, term: int) -> None:
    """V7: the greatest term was adopted, and kept: nobody could ask for a later one, ever again."""
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
def test_no_message_speaks_of_a_place_after_its_own_term(message: Message) -> None:
    """V22: a chunk of a small term brought the greatest one with its snapshot, which was adopted."""
    frame = b"".join(encode(message, 1))
    with pytest.raises(FormatError, match="term"):
        decode(decode_header(frame).kind, frame[FRAME_HEADER_BYTES:])


def test_a_leader_that_takes_its_own_entries_back_stops_the_follower(clock: Clock) -> None:
    """V22: the commit index went beyond the log, the loop never waited, and what came later was committed."""
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([3, 3, 3, 3]), commit=1)
    with pytest.raises(Diverged, match="replaced its own entries"):
        driven.append(3, INITIAL, entries_of([2, 2]), commit=5)


def test_two_leaders_of_one_term_stop_a_follower(clock: Clock) -> None:
    """V22: only a leader noticed; a follower changed sides, and cut what it had acknowledged."""
    driven = member(clock)
    driven.append(3, INITIAL, entries_of([3]), commit=1, peer="n2")
    with pytest.raises(Diverged, match="two leaders"):
        driven.append(3, INITIAL, entries_of([3], tag=b"other"), commit=1, peer="n3")


def _pack(disk: bytes, run: int, sequence: int, floor: int) -> bytes:
    """A pack's bytes, also such as `encode_commands` refuses to make."""
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
def test_a_peer_has_nothing_appended_but_commands_of_its_own_disk(clock: Clock, content: bytes) -> None:
    """V6: joins unseated every disk, forged packs silenced a member, a floor of 1 kept outcomes for ever."""
    driven = member(clock)
    driven.lead()
    last = driven.log.last
    driven.hear("n2", Forward(content))
    assert driven.log.last == last
    driven.hear("n2", Forward(_pack(disk_id("n2"), 5, PACKS_MAX, 1)))
    assert driven.log.last.index == last.index + 1


def test_a_node_whose_disk_proposes_elsewhere_in_a_later_life_stops(clock: Clock) -> None:
    """V6: what it proposed was a no-op for ever, and proposed again as fast as it was committed."""
    driven = member(clock)
    driven.append(2, INITIAL)
    driven.propose(b"mine")
    own = only(driven.hear("n2"), Forward).content
    other = encode_commands(disk_id("n1"), 99 << 32, 1, 1, [b"another run's"])
    with pytest.raises(Diverged, match="another node uses a copy"):
        driven.append(2, INITIAL, [RaftEntry(other, 2, 2), RaftEntry(own, 3, 2)], commit=3)


def test_a_node_whose_disk_was_rolled_back_stops(clock: Clock) -> None:
    """V12: its run and its sequences came again; its commands were no-ops for ever."""
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
def test_what_a_disks_former_self_proposed_settles_nothing(
    clock: Clock, learn: Callable[[Driven, Driven, RaftEntry], None], draw: bytes
) -> None:
    """X1: on a disk that was rolled back, a command was done when another of the same ordinals was."""

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


def test_a_disk_that_lost_what_it_acknowledged_counts_no_more(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """V12: its former word went on counting, it was probed for ever at the same place, without a line."""
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
    assert driven.raft.is_counted("n2") is False
    assert driven.raft.match_index("n2") == 0
    sent += driven.hear_all("n2", AppendEntriesReply(term, False, last, 1, claim_of("n2")))
    assert [append.prev.index for append in of_kind(sent, AppendEntries, "n2") if append.entries] == [1]
    driven.propose(b"more")
    driven.step()
    driven.acknowledge("n2", last + 1)
    driven.step()
    assert driven.status.committed == last  # n1 and a disk that nobody can rely on are no majority.
    driven.acknowledge("n3", last + 1)
    driven.step()
    assert driven.status.committed == last + 1


# --- Commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["text", bytearray(b"may change"), memoryview(array("i", [1, 2, 3])), None, 7]
)
def test_a_command_is_bytes_and_nothing_like_it(clock: Clock, command: Any) -> None:
    """V5: text ended the node; an array whose items are not bytes was committed, and ended all of them."""
    cluster = Lockstep(clock)
    leader = cluster.lead()
    with pytest.raises(TypeError, match="a command must be bytes"):
        leader.node.propose(command)
    assert leader.status.in_flight == 0
    cluster.commit(b"fine", via=leader.name)
    cluster.converge()


def proposals(**settings: Any) -> tuple[Proposals, ClusterState]:
    state = ClusterState(CLUSTER, 1, {"n1": claim_of("n1")})
    limits = {"commands_max": 10**9, "bytes_max": 10**12, "retry_s": 1.0, **settings}
    return Proposals(disk_id("n1"), 1, **limits), state


def _sequence(content: bytes) -> int:
    pack = decode_content(content)
    assert isinstance(pack, Commands)
    return pack.sequence


def test_packs_that_get_on_are_not_proposed_again(clock: Clock) -> None:
    """V4: once a second everything in flight was, although each pack was done in a fifth of that."""
    made, state = proposals()
    route, sent, under_way, index = Route("n2", 1, 1), [], deque[tuple[float, bytes]](), 1
    end = clock.now + 4
    while clock.now < end:
        while len(made._waiting) < 2 * PACKS_MAX:
            made.add(bytes(PACK_BYTES))
        for content in made.next_entries(route, clock.now):
            sent.append(_sequence(content))
            after = under_way[-1][0] + 0.0125 if under_way else 0.0  # One by one: some always are under way.
            under_way.append((max(clock.now + 0.2, after), content))
        while under_way and under_way[0][0] <= clock.now:
            index += 1
            applied = state.apply(RaftEntry(under_way.popleft()[1], index, 1))
            assert applied is not None
            made.on_applied(applied, state, clock.now)
        clock.advance(0.005)
    assert len(sent) > 5 * PACKS_MAX
    assert sent == sorted(set(sent))


def test_a_cluster_that_stalls_is_not_sent_everything_again_and_again(clock: Clock) -> None:
    """V4: a cluster slower than the retry appended all of it every second, and so grew ever slower."""
    made, _ = proposals()
    for _ in range(PACKS_MAX):
        made.add(bytes(PACK_BYTES))
    sent: list[int] = []
    for _ in range(300):
        sent += map(_sequence, made.next_entries(Route("n2", 1, 1), clock.now))
        clock.advance(0.1)
    assert sent == [*range(1, PACKS_MAX + 1), 1, 1, 1, 1]  # behind 1, 3, 7 and 15 seconds
    assert len(made.next_entries(Route("n2", 1, 2), clock.now)) == PACKS_MAX


def test_a_node_alone_commits_as_soon_as_it_has_synced(clock: Clock) -> None:
    """R1: a commit was seen at the next heartbeat only, as no answer came that would have ended the wait."""
    cluster = Lockstep(clock, ["n1"])
    cluster.commit(b"first")
    cluster.idle(1)
    alone = cluster.members["n1"]
    [future] = alone.propose(b"second")
    alone.node.step()
    for _ in range(5):
        if not future.done():
            assert alone.node.wait_s() == 0.0
            alone.node.step()
    assert future.done()
    assert alone.node.wait_s() > 0.0


# --- Snapshots -------------------------------------------------------------------------------------------


class Heavy(ListMachine):
    """A machine whose state takes long to send."""

    SIZE = 4 << 20

    def snapshot(self) -> Callable[[], bytes]:
        encode = super().snapshot()
        return lambda: encode().ljust(self.SIZE)

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        super().restore(index, state.rstrip())


class Slow:
    """Links that take their time; one that holds more than `outbox_bytes` is cut, as `TlsMesh` does it."""

    def __init__(self, cluster: Lockstep, *, bytes_per_s: float, outbox_bytes: float) -> None:
        self.cluster, self.bytes_per_s, self.outbox_bytes = cluster, bytes_per_s, outbox_bytes
        self.pipes: dict[tuple[str, str], deque[tuple[float, Message]]] = defaultdict(deque)
        self.free_at: dict[tuple[str, str], float] = defaultdict(float)
        self.data: dict[str, list[InstallSnapshot]] = defaultdict(list)
        self.overflows = 0
        cluster._step = self.step  # type: ignore[method-assign]

    def step(self, member: Member) -> None:
        before = len(member.wire.sent)
        member.node.step()
        for peer, message in member.wire.sent[before:]:
            self.queue(member.name, peer, message)
        del member.wire.sent[before:]
        for (sender, to), pipe in self.pipes.items():
            while to == member.name and pipe and pipe[0][0] <= self.cluster.clock.now:
                member.wire.put(sender, pipe.popleft()[1])

    def queue(self, sender: str, to: str, message: Message) -> None:
        link, now = (sender, to), self.cluster.clock.now
        if isinstance(message, InstallSnapshot) and message.data:
            self.data[to].append(message)
        self.free_at[link] = max(self.free_at[link], now) + self.size(message) / self.bytes_per_s
        if (self.free_at[link] - now) * self.bytes_per_s > self.outbox_bytes:
            self.overflows += 1
            self.cut(*link)
        else:
            self.pipes[link].append((self.free_at[link], message))

    def cut(self, one: str, two: str) -> None:
        """The connection ends with all that is under way; the next one is made at once."""
        for link in ((one, two), (two, one)):
            self.pipes[link].clear()
            self.free_at[link] = 0.0
        self.cluster._unlink(one, two)

    def received(self, name: str) -> int:
        incoming = self.cluster.members[name].node._installer.incoming
        return incoming.received if incoming is not None else 0

    @staticmethod
    def size(message: Message) -> int:
        if isinstance(message, AppendEntries):
            return 100 + sum(len(entry.content) for entry in message.entries)
        return 100 + len(getattr(message, "data", b""))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots in proportion: a window is a quarter of one."""
    monkeypatch.setattr(replication, "WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr(replication, "CHUNK_BYTES_MAX", 128 << 10)
    monkeypatch.setattr(raft_bench, "ListMachine", Heavy)


def lagging(cluster: Lockstep, *, commands: int = 30) -> str:
    """Cut a follower off until what it lacks is in no log any more; its name."""
    leader = cluster.lead()
    name = other_than(cluster, leader.name)
    cluster.isolate(name)
    while leader.log.base.index <= cluster.members[name].log.last.index:
        cluster.commit(*[b"%d" % at * 100 for at in range(commands)], via=leader.name)
        cluster.idle(0.15)
    return name


@pytest.mark.usefixtures("small_pieces")
def test_a_snapshot_gets_over_a_link_that_takes_longer_than_a_heartbeat_for_it(clock: Clock) -> None:
    """V3: the window was sent again at each heartbeat, until the outbox was full, without end."""
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1, segment_bytes=1000)
    name = lagging(cluster)
    slow = Slow(cluster, bytes_per_s=1e6, outbox_bytes=4 << 20)
    cluster.heal()
    cluster.converge()
    offsets = [chunk.offset for chunk in slow.data[name]]
    assert offsets
    assert offsets == sorted(set(offsets))
    assert slow.overflows == 0


@pytest.mark.usefixtures("small_pieces")
def test_a_snapshot_continues_over_the_next_connection_where_it_stood(clock: Clock) -> None:
    """V2: what the follower had already was queued at once behind it, more than any outbox takes."""
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1, segment_bytes=1000)
    name = lagging(cluster)
    slow = Slow(cluster, bytes_per_s=4e6, outbox_bytes=2 << 20)
    cluster.heal()
    cluster.run(lambda: slow.received(name) > 3 << 20)
    had, before = slow.received(name), len(slow.data[name])
    slow.cut(cluster.lead().name, name)
    cluster.converge()
    again = slow.data[name][before:]
    assert len({chunk.snapshot for chunk in slow.data[name]}) == 1
    # A new connection begins with a window, before the follower can say what it has.
    assert [chunk.offset for chunk in again if (1 << 20) <= chunk.offset < had] == []
    assert slow.overflows == 0


def test_what_a_follower_needs_after_its_snapshot_is_kept(clock: Clock) -> None:
    """V17: the leader's log went on without it meanwhile, so that it got snapshot after snapshot."""
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=8, segment_bytes=300)
    name = lagging(cluster)
    leader, follower = cluster.lead(), cluster.members[name]
    seen: list[SentMessage] = []
    cluster.drop_message = lambda _sender, to, message: bool(seen.append((to, message)))
    follower.worker.is_held = True
    cluster.heal()
    cluster.run(lambda: follower.worker.waiting)
    base = leader.log.base.index
    for at in range(5 * 8):
        cluster.commit(b"%d" % at, via=leader.name)
        cluster.idle(0.05)
    assert leader.status.snapshot > base + 30
    follower.worker.is_held = False
    cluster.converge()
    assert len({chunk.snapshot for chunk in of_kind(seen, InstallSnapshot, name)}) == 1
    # Not without bound: whoever never gets on costs so much, no more.
    cluster.isolate(name)
    for at in range(HOLD_FACTOR * 8):
        cluster.commit(b"%d" % at, via=leader.name)
        cluster.idle(0.02)
    assert leader.status.applied - leader.log.base.index < HOLD_FACTOR * 8


def test_a_slow_follower_does_not_make_each_snapshot_walk_through_the_log(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V24: all entries held were counted on the consensus thread, which cost a second per million."""
    driven = member(clock, keep_entries=10)
    term = driven.lead()
    start = driven.log.last.index + 1
    content = encode_commands(disk_id("n1"), 1, 1, 1, [b"x"])
    driven.log.extend([RaftEntry(content, start + at, term) for at in range(2000)])
    driven.step()
    for peer in ("n2", "n3"):
        progress = driven.raft._replication._progress[peer]
        progress.mode, progress.next = Mode.REPLICATE, INITIAL.index + 1
    looked: list[int] = []
    entry = type(driven.log).entry

    def counted(log: Any, index: int) -> RaftEntry:
        looked.append(index)
        return entry(log, index)

    monkeypatch.setattr(type(driven.log), "entry", counted)
    driven.node._snapshotter.compact(driven.log.last)
    assert 10 * HOLD_FACTOR <= len(looked) <= 10 * HOLD_FACTOR + 1


# --- A full disk -----------------------------------------------------------------------------------------


def test_a_file_system_that_needs_space_to_free_some_does_not_end_the_node(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V18: a log that could not be shortened ended the process."""
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


def test_a_full_disk_puts_off_what_a_node_notes_of_its_own_join(clock: Clock) -> None:
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


def test_a_full_disk_puts_off_becoming_a_member(clock: Clock) -> None:
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


def test_a_node_whose_disk_is_full_leads_nobody_and_says_so_each_time(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """V8: it called itself leader for hours, and a second full disk in one run was not logged."""
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


# --- Callbacks -------------------------------------------------------------------------------------------


def test_a_callback_that_would_exit_holds_up_nobody(clock: Clock) -> None:
    """V16: the other commands of its pack were never settled, not at the end either."""
    cluster = Lockstep(clock)
    leader = cluster.lead()
    futures = leader.propose(*[b"%d" % at for at in range(5)])
    futures[1].add_done_callback(lambda _future: sys.exit(3))
    cluster.run(lambda: all(future.done() for future in futures))
    late = leader.propose(b"a", b"b", b"c")
    late[0].add_done_callback(lambda _future: sys.exit(3))
    leader.node.proposals.close(Closed("the end"))
    assert all(isinstance(future.exception(0), Closed) for future in late)


def test_work_aside_that_would_exit_has_an_outcome() -> None:
    """V16: the helper was gone without a word, and with it every later snapshot and install."""
    woken = threading.Semaphore(0)
    worker = Worker("aside", woken.release)
    outcomes: list[object] = []

    def leave() -> None:
        raise SystemExit("from the machine's encoder")

    worker.run(leave, outcomes.append, outcomes.append)
    worker.run(lambda: "later work", outcomes.append, outcomes.append)
    for _ in range(2):
        assert woken.acquire(timeout=120)
    worker.collect()
    worker.close()
    assert [type(outcome) for outcome in outcomes] == [SystemExit, str]


# --- The running node ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TLS]:
    ca = tmp_path_factory.mktemp("pki")
    init_ca(ca)
    return {name: TLS(*issue(ca, Identity("s", "node", name), loopback=True)) for name in ("n1", "n2")}


def wait_for(condition: Callable[[], object], said: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.002)


class Gated(ListMachine):
    """Applies when it may."""

    def __init__(self, may_apply: threading.Event) -> None:
        super().__init__()
        self.may_apply = may_apply

    def apply(self, index: int, command: bytes) -> None:
        assert self.may_apply.wait(120)
        super().apply(index, command)


class Running:
    """One real node, alone, on a disk in memory. `failures`: what it failed with, and how it was then."""

    def __init__(self, tls: dict[str, TLS], disk: Any = None, **settings: Any) -> None:
        self.failures: list[tuple[type[BaseException], str, bool, str | None, int]] = []
        self.may_apply = threading.Event()
        self.may_apply.set()
        self.disk = MemoryDisk() if disk is None else disk
        self.tls, self.settings = tls, {"members": {"n1": f"{HOST}:1"}, "segment_bytes": 4096, **settings}
        self.raft = self.open()

    def open(self) -> Raft:
        config = RaftConfig(name="n1", directory=DIRECTORY, stream="s", bootstrap=True, **self.settings)
        more = {"tls": self.tls["n1"], "listen": (HOST, 0), "on_failure": self.on_failure}
        return Raft(config, Gated(self.may_apply), disk=self.disk, **more)

    def on_failure(self, error: BaseException) -> None:
        raft = self.raft
        state = raft.status().role, raft.is_leader, raft.leader, raft._mesh._listener.fileno()
        self.failures.append((type(error), *state))


def test_a_stop_on_a_full_disk_is_a_stop(tls: dict[str, TLS]) -> None:
    """V8: it was taken for a failure, which ends the process with status 70."""
    running = Running(tls)
    running.raft.propose(b"one").result(120)
    running.disk.capacity_bytes = 0
    future = running.raft.propose(bytes(100_000))
    wait_for(lambda: running.raft.status().role == "stalled")
    assert not running.raft.is_leader
    running.raft.stop()
    assert running.failures == []
    assert running.raft.status().role == "stopped"
    assert isinstance(future.exception(0), Closed)


def _descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0])
    return sorted(found)


def test_a_failed_opening_leaves_no_files(tls: dict[str, TLS], tmp_path: Path) -> None:
    """V9: each left a thread, an event, an epoll and a bound port."""
    running = Running(tls)
    running.raft.propose(b"one").result(120)
    running.raft.stop()
    path = f"{DIRECTORY}/identity"
    file = running.disk.open(path, write=True)
    [byte] = file.pread(1, 40)
    file.pwritev([bytes([byte ^ 1])], 40)
    threads, descriptors = set(threading.enumerate()), _descriptors()
    for _ in range(3):
        with pytest.raises(Corrupt):
            running.open()
        assert set(threading.enumerate()) == threads
        assert _descriptors() == descriptors
    file.pwritev([bytes([byte])], 40)
    file.close()
    running.raft = running.open()
    running.raft.propose(b"two").result(120)
    running.raft.stop()
    assert running.failures == []


class Dying(MemoryDisk):
    """A disk that hangs in the sync of a snapshot once it `is_failing`, and fails that of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.released = threading.Event(), threading.Event()
        self.is_hanging = self.is_failing = False
        self.renamed: list[str] = []

    def create(self, path: str) -> Any:
        return _DyingFile(super().create(path), path, self)

    def open(self, path: str, *, write: bool = False) -> Any:
        return _DyingFile(super().open(path, write=write), path, self)

    def rename(self, source: str, target: str) -> None:
        if self.is_failing and "snapshot" in target:
            self.renamed.append(target)
        super().rename(source, target)


class _DyingFile:
    def __init__(self, file: Any, path: str, disk: Dying) -> None:
        self._file, self._path, self._disk = file, path, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        if self._disk.is_hanging and "snapshot" in self._path:
            self._disk.hangs.set()
            assert self._disk.released.wait(120)
        if self._disk.is_failing and "/log." in self._path:
            raise OSError(errno.EIO, "Input/output error")
        self._file.sync()


def test_a_node_whose_disk_fails_ends_although_its_helper_hangs(tls: dict[str, TLS]) -> None:
    """V10: it went on listening and leading until a snapshot was synced, on a disk that was dying.

    X2: that snapshot then got its name, behind the failed sync.
    """
    disk = Dying()
    running = Running(tls, disk, snapshot_ms=50)
    try:
        running.raft.propose(b"one").result(120)
        disk.is_hanging = True
        running.raft.propose(b"two").result(120)
        assert disk.hangs.wait(120)
        disk.is_failing = True
        future = running.raft.propose(b"three")
        wait_for(lambda: running.failures)
        assert not disk.released.is_set()
        assert running.failures == [(StorageFailed, "stopped", False, None, -1)]
        assert isinstance(future.exception(0), Closed)
    finally:
        disk.released.set()
        running.raft.stop()
    assert disk.renamed == []


def test_a_node_may_be_stopped_from_a_callback_and_has_nothing_in_flight_then(tls: dict[str, TLS]) -> None:
    """V29: the thread tried to wait for itself; what was given up counted as in flight for ever."""
    running = Running(tls)
    raised: list[BaseException] = []
    later: list[Future[int]] = []

    def stop(_future: Future[int]) -> None:
        later.append(running.raft.propose(b"never"))
        try:
            running.raft.stop()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    running.may_apply.clear()
    running.raft.propose(b"one").add_done_callback(stop)
    running.may_apply.set()
    running.raft._thread.join(120)
    assert (raised, running.failures) == ([], [])
    assert isinstance(later[0].exception(0), Closed)
    assert (running.raft.status().role, running.raft.status().in_flight) == ("stopped", 0)
    running.raft.stop()


def test_a_stop_leaves_no_thread_but_one_that_looks_a_name_up(
    tls: dict[str, TLS], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V23: it was said to leave none at all; a resolver cannot be interrupted."""
    before, answer, asked = set(threading.enumerate()), threading.Event(), threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: Any, *more: Any, **options: Any) -> Any:
        if host == "slow.example" and not options.get("flags", 0) & socket.AI_NUMERICHOST:
            asked.set()
            assert answer.wait(120)
            raise socket.gaierror(socket.EAI_NONAME, "nobody")
        return look_up(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    members = {"n0": "slow.example:1", "n1": f"{HOST}:1", "n2": f"{HOST}:2"}
    running = Running(tls, members=members)
    assert asked.wait(120)
    running.raft.stop()
    left = set(threading.enumerate()) - before
    answer.set()
    assert [thread.name for thread in left] == ["look-up slow.example"]
    for thread in left:
        thread.join(120)
    assert running.failures == []


class Ups:
    """A receiver that knows who is up."""

    def __init__(self) -> None:
        self.up: set[str] = set()

    def on_up(self, peer: str, _hello: Hello) -> None:
        self.up.add(peer)

    def on_message(self, _peer: str, _message: Message) -> None:
        pass

    def on_down(self, peer: str) -> None:
        self.up.discard(peer)


class Silent:
    """A host that holds many connections, says nothing, and makes new ones for those that end."""

    def __init__(self, port: int, host: str, count: int) -> None:
        self.port, self.host, self.count = port, host, count
        self.made = 0
        self.sockets: list[socket.socket] = []

    def hold(self) -> None:
        kept = []
        for sock in self.sockets:
            if self._is_open(sock):
                kept.append(sock)
            else:
                sock.close()
        self.sockets = kept
        while len(self.sockets) < self.count:
            sock = socket.create_connection(("127.0.0.1", self.port), source_address=(self.host, 0))
            sock.setblocking(False)
            self.sockets.append(sock)
            self.made += 1

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()

    @staticmethod
    def _is_open(sock: socket.socket) -> bool:
        try:
            return sock.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def test_a_host_that_holds_connections_keeps_no_member_out(tls: dict[str, TLS]) -> None:
    """V14: once as many were not up as may be, whoever came next was refused, members too."""
    with contextlib.ExitStack() as stack:
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        listener.close()
        members = {"n1": f"{HOST}:{port}", "n2": f"{HOST}:1"}
        meshes = {
            name: TlsMesh(
                name=name,
                listen=(HOST, port if name == "n1" else 0),
                members=members,
                tls=tls[name],
                setup_s=1000.0,  # Time lets nobody in.
                backoff_s=(0.01, 0.05),
            )
            for name in members
        }
        inboxes = {name: Ups() for name in meshes}
        for mesh in meshes.values():
            stack.callback(mesh.close)
        meshes["n1"].start(inboxes["n1"], Hello(NO_ID, 0, DiskClaim(disk_id("n1"), NOWHERE)))
        silent = Silent(port, "127.0.0.2", 40)
        stack.callback(silent.close)
        while meshes["n1"].refused["busy"] < 40 - SETUPS_MAX:
            silent.hold()
            meshes["n1"].poll(0.001)
        meshes["n2"].start(inboxes["n2"], Hello(NO_ID, 0, DiskClaim(disk_id("n2"), NOWHERE)))

        def is_up() -> bool:
            silent.hold()
            for mesh in meshes.values():
                mesh.poll(0.001)
            assert len(meshes["n1"]._setups()) <= SETUPS_MAX
            return bool(inboxes["n1"].up and inboxes["n2"].up)

        wait_for(is_up, lambda: dict(meshes["n1"].refused))
        assert silent.made > 40
