"""Raft nodes driven by hand: a clock that a test moves, a network that a test reads, disks in memory.

`Driven` is one node whose peers are the test; `Lockstep` is a whole cluster in one thread. What a node does
with a message leaves it one round later, behind the sync, so `Driven.hear` steps twice.
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
"""What each forced epoch is named by."""


class Clock:
    """PySyncObj's clock while `virtual_clock` holds; it moves when a test says so."""

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
    """What a member's disk is called; each wipe makes another generation."""
    return f"{member}.{generation}".encode().ljust(16, b"-")


def claim_of(member: str, generation: int = 0, joined: LogIndex = INITIAL) -> DiskClaim:
    return DiskClaim(disk_id(member, generation), joined)


def commands_entry(
    index: int, term: int, *commands: bytes, proposer: str = "n2", sequence: int = 1
) -> RaftEntry:
    """An entry with commands of a member's first run."""
    return RaftEntry(encode_commands(disk_id(proposer), 1, sequence, sequence, commands), index, term)


def entries_of(terms: Sequence[int], start: int = 2, tag: bytes = b"") -> tuple[RaftEntry, ...]:
    """Entries from index `start` on with these terms; their commands say place and tag.

    Behind the first entry of a cluster they are all of them packs of one proposer, in order.
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
        """It is of one version."""

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        self.applied = ast.literal_eval(state.decode()) if state else []
        assert len(self.applied) == index

    @property
    def commands(self) -> list[bytes]:
        return [command for _, command in self.applied]


class HeldWorker:
    """Work worker: at once in the next round, or when the test lets it go."""

    def __init__(self) -> None:
        self.is_held = False
        self.waiting: list[tuple[Any, Any, Any]] = []
        self.finished: list[Callable[[], None]] = []

    def run(self, work: Any, done: Any, failed: Any) -> None:
        self.waiting.append((work, done, failed))

    def work(self) -> None:
        """Do what waits; its outcome is collected in the next round."""
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
    """A network whose other end is the test. What was flushed is in `sent`; what arrives is put by hand."""

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
    """A node with everything around it; `reopen` begins its next run."""

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
        """The disk's id and the cluster's, as they are known; then one that names a line."""
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
        """Terms of the entries kept."""
        return [entry.term for entry in self.log[1:]]

    def contents(self) -> list[tuple[int, int, bytes]]:
        """Index, term and first command (or none) of the entries kept."""
        return [
            (entry.index, entry.term, content.commands[0] if isinstance(content, Commands) else b"")
            for entry in self.log[1:]
            for content in [decode_content(entry.content)]
        ]

    def propose(self, *commands: bytes) -> list[Future[int]]:
        return [self.node.propose(command) for command in commands]

    def kept(self, keep: Keep | None, seed: int = 0) -> MemoryDisk:
        """The disk that the next run finds after a power cut; after kill -9 with `keep` None."""
        return self.disk.after_power_cut("all" if keep is None else keep, seed)


class Driven(Member):
    """One node; its peers are the test. `adopt` makes it a member of the cluster of initial disks."""

    def __init__(self, clock: Clock, config: RaftConfig, disk: MemoryDisk | None = None, **more: Any) -> None:
        super().__init__(config, disk, **more)
        self.clock = clock

    def up(self, *peers: str, claims: dict[str, DiskClaim] | None = None, **hello: Any) -> None:
        fields = {"cluster": self.cluster, "epoch": 1, **hello}
        for peer in peers or self.config.peers:
            claim = (claims or {}).get(peer, claim_of(peer))
            self.wire.link(peer, Hello(claim=claim, **fields))

    def step(self) -> list[SentMessage]:
        """One round; what left."""
        before = len(self.wire.sent)
        self.node.step()
        return self.wire.sent[before:]

    def hear(self, peer: str, *messages: Message) -> list[Message]:
        """Let messages arrive, and do what follows of them at once; what left for that peer."""
        return [message for other, message in self.hear_all(peer, *messages) if other == peer]

    def hear_all(self, peer: str, *messages: Message) -> list[SentMessage]:
        """The same, with what left for all peers."""
        for message in messages:
            self.wire.put(peer, message)
        return self.step() + self.step()

    def adopt(self, generations: dict[str, int] | None = None) -> None:
        """Become a member of a cluster of initial disks, as if a peer had just made it."""
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
        """The next run, all peers up; `keep` as `after_power_cut` has it, None for kill -9."""
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
        """Hear one append, and give the one answer to it."""
        sent = self.hear(peer, AppendEntries(term, prev, commit, *applied, tuple(entries)))
        return only(sent, AppendEntriesReply)

    def request_vote(
        self, peer: str, term: int, last: LogIndex, *, pre: bool = False, claim: DiskClaim | None = None
    ) -> RequestVoteReply | None:
        """Hear a request, and give the answer if there was one."""
        request = RequestVote(term, last, claim or claim_of(peer), pre)
        replies = [message for message in self.hear(peer, request) if isinstance(message, RequestVoteReply)]
        assert len(replies) < 2, replies
        return replies[0] if replies else None

    # As a candidate and a leader.

    def time_out(self) -> list[SentMessage]:
        """Hear nothing for longer than any election timeout; what left."""
        self.clock.advance(self.config.election_ms_max / 1000 + 0.001)
        return self.step() + self.step()

    def grant(self, peer: str, term: int, *, pre: bool, claim: DiskClaim | None = None) -> list[SentMessage]:
        return self.hear_all(peer, RequestVoteReply(term, True, claim or claim_of(peer), pre))

    def stand(self) -> int:
        """Be a candidate with a majority's pre-votes; the term."""
        self.time_out()
        term = self.raft.term + 1
        for peer in self.config.peers[: len(self.config.members) // 2]:
            self.grant(peer, term, pre=True)
        assert (self.raft.role, self.raft.term) == ("candidate", term)
        return term

    def lead(self) -> int:
        """Be elected; the term."""
        term = self.stand()
        for peer in self.config.peers[: len(self.config.members) // 2]:
            self.grant(peer, term, pre=False)
        assert self.raft.role == "leader"
        return term

    def acknowledge(self, peer: str, index: int, **fields: Any) -> list[SentMessage]:
        """A peer says that it has everything up to `index`; what the node makes of it."""
        reply = AppendEntriesReply(self.raft.term, True, index, index, claim_of(peer))
        return self.hear_all(peer, reply._replace(**fields))


def only(sent: Sequence[Any], kind: type[M]) -> M:
    """The one message of a kind."""
    found = [message for message in sent if isinstance(message, kind)]
    assert len(found) == 1, sent
    return found[0]


def of_kind(sent: Sequence[SentMessage], kind: type[M], peer: str | None = None) -> list[M]:
    """Messages of a kind among what left (for that peer)."""
    return [message for to, message in sent if isinstance(message, kind) and peer in {None, to}]


class Lockstep:
    """A cluster in one thread: every round all nodes step, then time goes on by `TICK_S`."""

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
        """Nodes that the cluster did not know at first, with what they know."""
        self.rounds = 0
        self.seeds = itertools.count()
        self.drop_message: Callable[[str, str, Message], bool] = lambda _from, _to, _message: False
        for name in names:
            self.start(name)

    # Nodes.

    def start(
        self, name: str, disk: MemoryDisk | None = None, names: Sequence[str] = (), **settings: Any
    ) -> Member:
        """Begin a run, on a new disk if none is given; with other configured members if given."""
        if name in self.spares:
            names, settings = names or self.spares[name], {"bootstrap": False, **settings}
        config = config_of(name, names or self.names, **{**self.settings, **settings})
        # Were two nodes to make a cluster, it would be two.
        cluster = f"made by {name}".encode().ljust(16)
        fields = {"generation": self.generations[name], "seed": next(self.seeds), "cluster": cluster}
        member = Member(config, disk, **fields)
        self.members[name], self.disks[name] = member, member.disk
        return member

    def kill(self, name: str) -> MemoryDisk:
        """End a process; its disk as it is."""
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
        """Start a blank node that the cluster does not know; it knows one member, or these."""
        self.generations.setdefault(name, 0)
        self.spares[name] = [name, *(others or self.names[:1])]
        return self.start(name)

    def request(self, change: MemberChange, via: str | None = None) -> Future[None]:
        """Ask a node, the leader by default, for a change of the members."""
        member, done = self.members[via] if via else self.lead(), Future[None]()
        member.node._calls.append(lambda: member.node.change_members(change, done))
        return done

    def change(self, change: MemberChange) -> None:
        """Have a change made, however often that takes."""
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
        """Have a spare node added, and promoted."""
        self.change(AddLearner(name, f"{name}:1"))
        if is_voter:
            self.change(PromoteLearner(name))

    def remove(self, name: str) -> None:
        """Have a member removed; if it leads, by another leader."""
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
        """Go on until the condition holds, which it must within that many seconds of virtual time."""
        for _ in range(int(seconds / TICK_S)):
            if until():
                return
            self.round()
        assert until(), [member.status for member in self.members.values()]

    def idle(self, seconds: float) -> None:
        """Let that much time go by."""
        for _ in range(int(seconds / TICK_S)):
            self.round()

    # Looking.

    @property
    def leader(self) -> Member | None:
        """Whom a majority follows."""
        for name, member in self.members.items():
            voters = member.raft.voter_disks.voters
            followers = [voter for voter in voters & self.members.keys() if self.follows(voter, name)]
            if member.raft.role == "leader" and 2 * len(followers) > len(voters):
                return member
        return None

    def follows(self, name: str, leader: str) -> bool:
        return self.members[name].raft.leader == leader

    def lead(self) -> Member:
        """Run until there is one."""
        self.run(lambda: self.leader)
        assert self.leader is not None
        return self.leader

    def commit(self, *commands: bytes, via: str | None = None) -> list[int]:
        """Have commands committed; their indexes."""
        member = self.members[via] if via else self.lead()
        futures = member.propose(*commands)
        self.run(lambda: all(future.done() for future in futures))
        return [future.result(0) for future in futures]

    def converge(self) -> None:
        """Run until all live nodes have applied all they have, and check that it is the same."""
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
        """A node gets the notice of another one that does not have it in its list."""
        wire, other = self.members[name].wire, self.members[by].wire
        if name not in other.listed and by in wire.listed and other.notice is not None:
            wire.link(by, other.hello)
            wire.put(by, other.notice)
            wire.arriving.append(lambda: wire.drop(by))

    def _unlink(self, one: str, two: str) -> None:
        for name, peer in ((one, two), (two, one)):
            if name in self.members:
                self.members[name].wire.drop(peer)
