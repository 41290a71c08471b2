"""Snapshot transfer to lagging followers: slow links, reconnections, log kept for them, newer versions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import raft_bench
from raft_bench import (
    Clock,
    ListMachine,
    Lockstep,
    Member,
    SentMessage,
    disk_id,
    of_kind,
)
from raft_members import member, other_than

from rt.errors import UnknownVersion
from sequencer.raft.core import replication
from sequencer.raft.core.progress import Mode
from sequencer.raft.lifecycle.snapshotter import HOLD_FACTOR
from sequencer.raft.model.cluster_state import INITIAL
from sequencer.raft.model.entry_codec import (
    encode_commands,
)
from sequencer.raft.model.messages import (
    AppendEntries,
    InstallSnapshot,
    Message,
    RaftEntry,
)


class Heavy(ListMachine):
    """A state machine with a state that takes long to send."""

    SIZE = 4 << 20

    def snapshot(self) -> Callable[[], bytes]:
        encode = super().snapshot()
        return lambda: encode().ljust(self.SIZE)

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        super().restore(index, state.rstrip())


class Slow:
    """Slow links. A link that holds more than `outbox_bytes` is cut, as `TlsMesh` does it."""

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
        """End the connection with everything that is under way. The next connection is made at once."""
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
    """Reduce the sizes in proportion: a window is a quarter of a snapshot."""
    monkeypatch.setattr(replication, "WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr(replication, "CHUNK_BYTES_MAX", 128 << 10)
    monkeypatch.setattr(raft_bench, "ListMachine", Heavy)


def lagging(cluster: Lockstep, *, commands: int = 30) -> str:
    """Cut a follower off until no log contains the entries that it misses. Return its name."""
    leader = cluster.lead()
    name = other_than(cluster, leader.name)
    cluster.isolate(name)
    while leader.log.base.index <= cluster.members[name].log.last.index:
        cluster.commit(*[b"%d" % at * 100 for at in range(commands)], via=leader.name)
        cluster.idle(0.15)
    return name


@pytest.mark.usefixtures("small_pieces")
def test_snapshot_chunks_are_sent_once_over_link_slower_than_heartbeat(clock: Clock) -> None:
    """V3: the window was sent again at each heartbeat until the outbox was full, indefinitely."""
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
def test_snapshot_transfer_continues_at_received_offset_after_reconnection(clock: Clock) -> None:
    """V2: the bytes that the follower already had were queued again at once, more than any outbox takes."""
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
    # A new connection starts with one window, before the follower can report what it has.
    assert [chunk.offset for chunk in again if (1 << 20) <= chunk.offset < had] == []
    assert slow.overflows == 0


def test_leader_keeps_bounded_log_for_follower_installing_snapshot(clock: Clock) -> None:
    """V17: meanwhile the leader compacted its log past the follower, which then got snapshot after
    snapshot.
    """
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
    # The retained log is bounded: a follower without progress costs no more than this.
    cluster.isolate(name)
    for at in range(HOLD_FACTOR * 8):
        cluster.commit(b"%d" % at, via=leader.name)
        cluster.idle(0.02)
    assert leader.status.applied - leader.log.base.index < HOLD_FACTOR * 8


def test_compaction_reads_bounded_number_of_entries_for_slow_follower(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V24: the consensus thread counted all retained entries, which cost a second per million."""
    driven = member(clock, keep_entries=10)
    term = driven.lead()
    start = driven.log.last.index + 1
    content = encode_commands(disk_id("n1"), 1, 1, 1, [b"x"])
    for at in range(2000):
        driven.log.append(RaftEntry(content, start + at, term))
    driven.step()
    for peer in ("n2", "n3"):
        progress = driven.raft.leader_role._replication._progress[peer]
        progress.mode, progress.next = Mode.REPLICATE, INITIAL.index + 1
    looked: list[int] = []
    entry = type(driven.log).entry

    def counted(log: Any, index: int) -> RaftEntry:
        looked.append(index)
        return entry(log, index)

    monkeypatch.setattr(type(driven.log), "entry", counted)
    driven.node._snapshotter.compact(driven.log.last)
    assert 10 * HOLD_FACTOR <= len(looked) <= 10 * HOLD_FACTOR + 1


@pytest.mark.parametrize("is_blank", [False, True], ids=["behind", "blank"])
def test_received_snapshot_of_unknown_version_raises_and_replaces_nothing(
    clock: Clock, is_blank: bool
) -> None:
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1, segment_bytes=1000)
    name = lagging(cluster)
    if is_blank:
        cluster.wipe(name)
    member = cluster.members[name]
    before = member.commands, member.log.last, member.node.state.applied

    def check(_state: bytes) -> None:
        raise UnknownVersion("the cluster has a feature level that this rt does not know", got="level 2")

    member.node._machine.check = check  # type: ignore[method-assign]
    cluster.heal()
    with pytest.raises(
        UnknownVersion, match="a snapshot that a peer sent; the files of this node are unchanged"
    ):
        cluster.run(lambda: member.node.state.applied > before[2])
    assert (member.commands, member.log.last, member.node.state.applied) == before
