"""Raft nodes driven by hand: a test moves the clock and reads the network; disks are in memory.

`Driven` is one node; the test plays its peers. `Lockstep` is a whole cluster in one thread. The reaction of a
node to a message is sent one round later, after the sync, so `Driven.hear` steps twice.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from disks import Keep, MemoryDisk

from rt.errors import DiskFull
from sequencer.raft.core import pysyncobj_adapter
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.ports import MessageReceiver
from sequencer.raft.lifecycle.services import NodeEnvironment
from sequencer.raft.model.api import Status
from sequencer.raft.model.cluster_state import INITIAL, encode_state, initial_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import Commands, decode_content, encode_commands
from sequencer.raft.model.epochs import EpochOver
from sequencer.raft.model.members import (
    AddLearner,
    MemberChange,
    MemberChangeNotReady,
    MemberRemoved,
    PromoteLearner,
    RemoveMember,
)
from sequencer.raft.model.messages import (
    Admit,
    AppendEntries,
    AppendEntriesReply,
    DiskClaim,
    Hello,
    LogIndex,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
)
from sequencer.raft.node import RaftNode
from sequencer.raft.storage.log import DurableLog

DIRECTORY = "/raft"
CLUSTER = b"the one cluster."
TICK_S = 0.005
SentMessage = tuple[str, Message]
M = TypeVar("M")


_LOTS = itertools.count(1)
"""Numbers that become the names of forced epochs."""


class Clock:
    """PySyncObj's clock inside `virtual_clock`. Only the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


@contextlib.contextmanager
def virtual_clock() -> Iterator[Clock]:
    clock = Clock()
    with pysyncobj_adapter.clock(lambda: clock.now):
        yield clock


def disk_id(member: str, generation: int = 0) -> bytes:
    """Return the id of a member's disk. Each wipe creates another generation."""
    return f"{member}.{generation}".encode().ljust(16, b"-")


def claim_of(member: str, generation: int = 0, joined: LogIndex = INITIAL) -> DiskClaim:
    return DiskClaim(disk_id(member, generation), joined)


def commands_entry(
    index: int, term: int, *commands: bytes, proposer: str = "n2", sequence: int = 1
) -> RaftEntry:
    """An entry with commands of a member's first run."""
    return RaftEntry(encode_commands(disk_id(proposer), 1, sequence, sequence, commands), index, term)


def entries_of(terms: Sequence[int], start: int = 2, tag: bytes = b"") -> tuple[RaftEntry, ...]:
    """Return entries from index `start` on with these terms. Each command contains index, term and tag.

    If they follow the first entry of a cluster, all of them are packs of one proposer, in order.
    """
    return tuple(
        commands_entry(index, term, b"%d/%d%s" % (index, term, tag), sequence=index - 1)
        for index, term in enumerate(terms, start)
    )


class ListMachine:
    """Keeps every command with its index."""

    def __init__(self) -> None:
        self.applied: list[tuple[int, bytes]] = []

    def apply(self, index: int, command: bytes) -> None:
        assert index == len(self.applied) + 1, (index, len(self.applied))
        self.applied.append((index, command))

    def snapshot(self) -> Callable[[], bytes]:
        frozen = list(self.applied)
        return lambda: repr(frozen).encode()

    def digest(self) -> bytes:
        return repr(self.applied).encode()

    def check(self, state: bytes) -> None:
        """Accept every state: there is only one version."""

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        self.applied = ast.literal_eval(state.decode()) if state else []
        assert len(self.applied) == index

    @property
    def commands(self) -> list[bytes]:
        return [command for _, command in self.applied]


class HeldWorker:
    """A worker that works at once in the next round, or, if held, when the test calls `work`."""

    def __init__(self) -> None:
        self.is_held = False
        self.waiting: list[tuple[Any, Any, Any]] = []
        self.finished: list[Callable[[], None]] = []

    def run(self, work: Any, done: Any, failed: Any) -> None:
        self.waiting.append((work, done, failed))

    def work(self) -> None:
        """Do the waiting work. Its outcome is collected in the next round."""
        waiting, self.waiting = self.waiting, []
        for work, done, failed in waiting:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001
                self.finished.append(lambda failed=failed, error=error: failed(error))
            else:
                self.finished.append(lambda done=done, result=result: done(result))

    def collect(self) -> None:
        if not self.is_held:
            self.work()
        finished, self.finished = self.finished, []
        for call in finished:
            call()

    def close(self) -> None:
        self.waiting.clear()


class Wire:
    """A network whose other end is the test. `sent`: flushed messages. The test puts arriving messages."""

    def __init__(self) -> None:
        self.connected: Collection[str] = set()
        self.queued: list[SentMessage] = []
        self.sent: list[SentMessage] = []
        self.arriving: deque[Callable[[], None]] = deque()
        self.receiver: MessageReceiver
        self.hello: Hello
        self.flushes = 0
        self.before_flush: Callable[[list[SentMessage]], None] = lambda _messages: None
        self.listed: dict[str, str] = {}
        self.notice: Message | None = None
        self.is_dialling_all = False
        self.on_introduce: Callable[[], None] = lambda: None

    def start(self, receiver: MessageReceiver, hello: Hello) -> None:
        self.receiver, self.hello = receiver, hello

    def introduce(self, hello: Hello) -> None:
        self.hello = hello
        for peer in sorted(self.connected):
            self.drop(peer)
        self.on_introduce()

    def set_members(self, members: Mapping[str, str], notice: Message | None) -> None:
        self.listed, self.notice = dict(members), notice
        for peer in sorted(set(self.connected) - set(members)):
            self.drop(peer)

    def dial_all(self, *, is_wanted: bool) -> None:
        self.is_dialling_all = is_wanted

    def send(self, peer: str, message: Message) -> bool:
        if peer not in self.connected:
            return False
        self.queued.append((peer, message))
        return True

    def flush(self) -> None:
        self.before_flush(self.queued)
        self.sent += [(peer, message) for peer, message in self.queued if peer in self.connected]
        self.queued.clear()
        self.flushes += 1

    def poll(self, _timeout_s: float) -> None:
        for _ in range(len(self.arriving)):
            self.arriving.popleft()()

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.connected = set()

    # For the other end.

    def link(self, peer: str, hello: Hello) -> None:
        self.connected = {*self.connected, peer}
        self.arriving.append(lambda: self.receiver.on_up(peer, hello))

    def drop(self, peer: str) -> None:
        if peer in self.connected:
            self.connected = {*self.connected} - {peer}
            self.queued = [item for item in self.queued if item[0] != peer]
            self.arriving.append(lambda: self.receiver.on_down(peer))

    def put(self, peer: str, message: Message) -> None:
        def arrive() -> None:
            if peer in self.connected:
                self.receiver.on_message(peer, message)

        self.arriving.append(arrive)


def config_of(name: str, members: Sequence[str], **settings: Any) -> RaftConfig:
    addresses = {member: f"{member}:1" for member in members}
    settings = {"bootstrap": False, "snapshot_ms": 1_000_000, **settings}
    return RaftConfig(name=name, members=addresses, directory=DIRECTORY, stream="s", **settings)


def refuse_full_disk(error: DiskFull) -> None:
    raise error


class Member:
    """A node with its disk, machine, network and worker."""

    def __init__(
        self,
        config: RaftConfig,
        disk: MemoryDisk | None = None,
        *,
        generation: int = 0,
        seed: int = 0,
        cluster: bytes = CLUSTER,
        on_disk_full: Callable[[DiskFull], None] = refuse_full_disk,
    ) -> None:
        self.config, self.seed, self.generation, self.cluster = config, seed, generation, cluster
        self.on_disk_full = on_disk_full
        self.disk = MemoryDisk() if disk is None else disk
        self.machine, self.wire, self.worker = ListMachine(), Wire(), HeldWorker()
        is_new = f"{config.directory}/identity" not in self.disk.paths()
        ids = [disk_id(config.name, generation)] if is_new else []
        self._ids = itertools.chain(ids, itertools.repeat(cluster))
        self._is_open = False
        self.node = RaftNode(
            config,
            self.machine,
            NodeEnvironment(self.wire, self.worker, random.Random(seed), self._new_id, self.disk),
            on_disk_full=on_disk_full,
        )
        self._is_open = True

    def _new_id(self) -> bytes:
        """Return the disk's id, then the cluster's. If the node is a member, return a new epoch's name."""
        is_member = self._is_open and not self.node._own.is_blank
        return next(_LOTS).to_bytes(16, "little") if is_member else next(self._ids)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def raft(self) -> SyncObj:
        return self.node._raft

    @property
    def log(self) -> DurableLog:
        return self.node._log

    @property
    def status(self) -> Status:
        return self.node.status()

    @property
    def commands(self) -> list[bytes]:
        return self.machine.commands

    def terms(self) -> list[int]:
        """Return the terms of the entries in the log."""
        return [entry.term for entry in self.log[1:]]

    def contents(self) -> list[tuple[int, int, bytes]]:
        """Return index, term and first command (empty if none) of the entries in the log."""
        return [
            (entry.index, entry.term, content.commands[0] if isinstance(content, Commands) else b"")
            for entry in self.log[1:]
            for content in [decode_content(entry.content)]
        ]

    def propose(self, *commands: bytes) -> list[Future[int]]:
        return [self.node.propose(command) for command in commands]

    def kept(self, keep: Keep | None, seed: int = 0) -> MemoryDisk:
        """Return the disk of the next run after a power cut, or after kill -9 if `keep` is None."""
        return self.disk.after_power_cut("all" if keep is None else keep, seed)


class Driven(Member):
    """One node; the test plays its peers. `adopt` makes it a member of the cluster of initial disks."""

    def __init__(self, clock: Clock, config: RaftConfig, disk: MemoryDisk | None = None, **more: Any) -> None:
        super().__init__(config, disk, **more)
        self.clock = clock

    def up(self, *peers: str, claims: dict[str, DiskClaim] | None = None, **hello: Any) -> None:
        fields = {"cluster": self.cluster, "epoch": 1, **hello}
        for peer in peers or self.config.peers:
            claim = (claims or {}).get(peer, claim_of(peer))
            self.wire.link(peer, Hello(claim=claim, **fields))

    def step(self) -> list[SentMessage]:
        """Run one round. Return the messages that were sent."""
        before = len(self.wire.sent)
        self.node.step()
        return self.wire.sent[before:]

    def hear(self, peer: str, *messages: Message) -> list[Message]:
        """Deliver messages, and run two rounds. Return the messages sent to that peer."""
        return [message for other, message in self.hear_all(peer, *messages) if other == peer]

    def hear_all(self, peer: str, *messages: Message) -> list[SentMessage]:
        """Do the same as `hear`, but return the messages sent to all peers."""
        for message in messages:
            self.wire.put(peer, message)
        return self.step() + self.step()

    def adopt(self, generations: dict[str, int] | None = None) -> None:
        """Become a member of a cluster of initial disks, as if a peer had just created it."""
        disks = {
            member: disk_id(member, (generations or {}).get(member, 0)) for member in self.config.members
        }
        content = encode_state(initial_state(self.cluster, 1, disks))
        giver = self.config.peers[0]
        self.up(giver)
        self.hear(giver, Admit(content))
        self.step()
        self.up()
        self.step()
        self.wire.sent.clear()

    def reopened(self, keep: Keep | None = None, seed: int = 0, **settings: Any) -> Driven:
        """Return the next run, all peers connected. `keep` as in `after_power_cut`; None means kill -9."""
        config = config_of(self.name, list(self.config.members), **settings)
        fields = {"generation": self.generation, "cluster": self.cluster, "seed": self.seed + 1}
        other = Driven(self.clock, config, self.kept(keep, seed), **fields)
        other.up()
        other.step()
        return other

    # As a follower.

    def append(
        self,
        term: int,
        prev: LogIndex,
        entries: Sequence[RaftEntry] = (),
        *,
        commit: int = 0,
        peer: str = "n2",
        applied: tuple[int, int] = (0, 0),
    ) -> AppendEntriesReply:
        """Receive one append, and return the only answer to it."""
        sent = self.hear(peer, AppendEntries(term, prev, commit, *applied, tuple(entries)))
        return only(sent, AppendEntriesReply)

    def request_vote(
        self, peer: str, term: int, last: LogIndex, *, pre: bool = False, claim: DiskClaim | None = None
    ) -> RequestVoteReply | None:
        """Receive a vote request, and return the answer if there is one."""
        request = RequestVote(term, last, claim or claim_of(peer), pre)
        replies = [message for message in self.hear(peer, request) if isinstance(message, RequestVoteReply)]
        assert len(replies) < 2, replies
        return replies[0] if replies else None

    # As a candidate and a leader.

    def time_out(self) -> list[SentMessage]:
        """Receive nothing for longer than any election timeout. Return the messages that were sent."""
        self.clock.advance(self.config.election_ms_max / 1000 + 0.001)
        return self.step() + self.step()

    def grant(self, peer: str, term: int, *, pre: bool, claim: DiskClaim | None = None) -> list[SentMessage]:
        return self.hear_all(peer, RequestVoteReply(term, True, claim or claim_of(peer), pre))

    def stand(self) -> int:
        """Become a candidate with the pre-votes of a majority. Return the term."""
        self.time_out()
        term = self.raft.term + 1
        for peer in self.config.peers[: len(self.config.members) // 2]:
            self.grant(peer, term, pre=True)
        assert (self.raft.role, self.raft.term) == ("candidate", term)
        return term

    def lead(self) -> int:
        """Get elected. Return the term."""
        term = self.stand()
        for peer in self.config.peers[: len(self.config.members) // 2]:
            self.grant(peer, term, pre=False)
        assert self.raft.role == "leader"
        return term

    def acknowledge(self, peer: str, index: int, **fields: Any) -> list[SentMessage]:
        """Receive a peer's acknowledgement of everything up to `index`. Return the sent messages."""
        reply = AppendEntriesReply(self.raft.term, True, index, index, claim_of(peer))
        return self.hear_all(peer, reply._replace(**fields))


def only(sent: Sequence[Any], kind: type[M]) -> M:
    """Return the only message of a kind."""
    found = [message for message in sent if isinstance(message, kind)]
    assert len(found) == 1, sent
    return found[0]


def of_kind(sent: Sequence[SentMessage], kind: type[M], peer: str | None = None) -> list[M]:
    """Return the sent messages of a kind, to that peer if given."""
    return [message for to, message in sent if isinstance(message, kind) and peer in {None, to}]


class Lockstep:
    """A cluster in one thread. In each round all nodes step, then the clock advances by `TICK_S`."""

    def __init__(self, clock: Clock, names: Sequence[str] = ("n1", "n2", "n3"), **settings: Any) -> None:
        self.clock, self.names = clock, list(names)
        self.settings = {"bootstrap": True, **settings}
        self.members: dict[str, Member] = {}
        self.disks: dict[str, MemoryDisk] = {}
        self.generations = dict.fromkeys(names, 0)
        self.cuts: set[frozenset[str]] = set()
        self.removed: dict[str, MemberRemoved] = {}
        """Nodes that ended because they are no members."""
        self.spares: dict[str, list[str]] = {}
        """Nodes that the cluster did not know at first, with the members that they know."""
        self.rounds = 0
        self.seeds = itertools.count()
        self.drop_message: Callable[[str, str, Message], bool] = lambda _from, _to, _message: False
        for name in names:
            self.start(name)

    # Nodes.

    def start(
        self, name: str, disk: MemoryDisk | None = None, names: Sequence[str] = (), **settings: Any
    ) -> Member:
        """Start a run, on a new disk if none is given, and with other configured members if given."""
        if name in self.spares:
            names, settings = names or self.spares[name], {"bootstrap": False, **settings}
        config = config_of(name, names or self.names, **{**self.settings, **settings})
        # If two nodes each made a cluster, the cluster ids would differ.
        cluster = f"made by {name}".encode().ljust(16)
        fields = {"generation": self.generations[name], "seed": next(self.seeds), "cluster": cluster}
        member = Member(config, disk, **fields)
        self.members[name], self.disks[name] = member, member.disk
        return member

    def kill(self, name: str) -> MemoryDisk:
        """End a process. Return its disk as it is."""
        member = self.members.pop(name)
        for other in self.members:
            self.members[other].wire.drop(name)
        return member.disk

    def restart(self, name: str, keep: Keep | None = None, **settings: Any) -> Member:
        """Kill, or cut the power, and start again."""
        disk = self.kill(name) if name in self.members else self.disks[name]
        return self.start(name, disk.after_power_cut("all" if keep is None else keep), **settings)

    def wipe(self, name: str) -> Member:
        """Start on an empty disk."""
        if name in self.members:
            self.kill(name)
        self.generations[name] += 1
        return self.start(name)

    # Members.

    def spare(self, name: str, *others: str) -> Member:
        """Start a blank node that the cluster does not know. It knows one member, or the given ones."""
        self.generations.setdefault(name, 0)
        self.spares[name] = [name, *(others or self.names[:1])]
        return self.start(name)

    def request(self, change: MemberChange, via: str | None = None) -> Future[None]:
        """Ask a node, the leader by default, for a change of the members."""
        member, done = self.members[via] if via else self.lead(), Future[None]()
        member.node._calls.append(lambda: member.node.change_members(change, done))
        return done

    def change(self, change: MemberChange) -> None:
        """Request a change until it succeeds."""
        for _ in range(100):
            done = self.request(change)
            self.run(done.done)
            error = done.exception(0)
            if error is None:
                return
            if not isinstance(error, MemberChangeNotReady):
                raise error
            self.idle(0.1)
        raise AssertionError(error)

    def add(self, name: str, *, is_voter: bool = True) -> None:
        """Add a spare node, and promote it if `is_voter`."""
        self.change(AddLearner(name, f"{name}:1"))
        if is_voter:
            self.change(PromoteLearner(name))

    def remove(self, name: str) -> None:
        """Remove a member. If it leads, transfer the leadership first."""
        node = self.members[name].node if name in self.members else None
        while node is not None and self.lead().name == name:
            node._calls.append(lambda: node.transfers.start(1.0, Future()))
            self.idle(0.1)
        self.change(RemoveMember(name))

    # Links.

    def cut(self, *pairs: tuple[str, str]) -> None:
        for pair in pairs:
            self.cuts.add(frozenset(pair))
            self._unlink(*pair)

    def isolate(self, name: str) -> None:
        self.cut(*((name, other) for other in self.names if other != name))

    def heal(self) -> None:
        self.cuts.clear()

    # Time.

    def round(self) -> None:
        self._link()
        self.rounds += 1
        for name in list(self.members):
            if name in self.members:
                self._step(self.members[name])
        self.clock.advance(TICK_S)

    def run(self, until: Callable[[], object] = lambda: False, *, seconds: float = 10.0) -> None:
        """Run rounds until the condition holds. It must hold within that many seconds of virtual time."""
        for _ in range(int(seconds / TICK_S)):
            if until():
                return
            self.round()
        assert until(), [member.status for member in self.members.values()]

    def idle(self, seconds: float) -> None:
        """Run rounds for that many seconds of virtual time."""
        for _ in range(int(seconds / TICK_S)):
            self.round()

    # State.

    @property
    def leader(self) -> Member | None:
        """The leader that a majority follows."""
        for name, member in self.members.items():
            voters = member.raft.voter_disks.voters
            followers = [voter for voter in voters & self.members.keys() if self.follows(voter, name)]
            if member.raft.role == "leader" and 2 * len(followers) > len(voters):
                return member
        return None

    def follows(self, name: str, leader: str) -> bool:
        return self.members[name].raft.leader == leader

    def lead(self) -> Member:
        """Run until there is a leader. Return it."""
        self.run(lambda: self.leader)
        assert self.leader is not None
        return self.leader

    def commit(self, *commands: bytes, via: str | None = None) -> list[int]:
        """Commit commands. Return their indexes."""
        member = self.members[via] if via else self.lead()
        futures = member.propose(*commands)
        self.run(lambda: all(future.done() for future in futures))
        return [future.result(0) for future in futures]

    def converge(self) -> None:
        """Run until all live nodes have applied their whole logs. Assert that their states are the same."""
        self.run(
            lambda: (
                self.leader
                and len({member.node.state.applied for member in self.members.values()}) == 1
                and all(member.node.state.applied == member.log.last for member in self.members.values())
            )
        )
        assert len({member.node.state.chain for member in self.members.values()}) == 1
        assert len({tuple(member.machine.applied) for member in self.members.values()}) == 1

    def _step(self, member: Member) -> None:
        before = len(member.wire.sent)
        try:
            member.node.step()
        except EpochOver:
            member.node.close()
            self.restart(member.name)
            return
        except MemberRemoved as error:
            member.node.close()
            self.removed[member.name] = error
            self.disks[member.name] = self.kill(member.name)
            return
        for peer, message in member.wire.sent[before:]:
            other = self.members.get(peer)
            if other is not None and not self.drop_message(member.name, peer, message):
                other.wire.put(member.name, message)

    def _link(self) -> None:
        for one, two in itertools.combinations(self.members, 2):
            ends = self.members[one].wire, self.members[two].wire
            if frozenset((one, two)) in self.cuts:
                continue
            if two not in ends[0].listed or one not in ends[1].listed:
                if self.rounds % 40 == 0:
                    self._refuse(one, two)
                    self._refuse(two, one)
            elif two not in ends[0].connected or one not in ends[1].connected:
                self._unlink(one, two)
                ends[0].link(two, ends[1].hello)
                ends[1].link(one, ends[0].hello)

    def _refuse(self, name: str, by: str) -> None:
        """Send `name` the notice of `by`, if `by` does not list it as a member."""
        wire, other = self.members[name].wire, self.members[by].wire
        if name not in other.listed and by in wire.listed and other.notice is not None:
            wire.link(by, other.hello)
            wire.put(by, other.notice)
            wire.arriving.append(lambda: wire.drop(by))

    def _unlink(self, one: str, two: str) -> None:
        for name, peer in ((one, two), (two, one)):
            if name in self.members:
                self.members[name].wire.drop(peer)
