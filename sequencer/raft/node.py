"""A member of the cluster: the protocol, its disk, its network and its proposals, in one loop.

`RaftNode` is what the loop does, without a thread: a simulation steps it. `Raft` is the node that runs.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Final, TypeVar

from rt.epochs import is_later, is_rival, is_succeeded, may_be_reset, name_of, number_of
from rt.errors import ClusterMismatch, DiskFull, FormatError, StorageError
from rt.log.disk import REAL, Disk
from sequencer.raft.aside import Aside
from sequencer.raft.config import RaftConfig
from sequencer.raft.consensus import Leadership, MemberStatus, StateMachine, Status
from sequencer.raft.entries import Commands, Reset, decode_content, encode_reset
from sequencer.raft.epochs import EpochOver, LeftBehind, NoMajority, forced_epoch, next_epoch
from sequencer.raft.fetching import Fetched, Fetching
from sequencer.raft.forcing import is_ending, refusal
from sequencer.raft.giving import Giving
from sequencer.raft.hardened import PATIENCE_ELECTIONS, SyncObj
from sequencer.raft.identity import DiskIdentity
from sequencer.raft.leaving import Leaving
from sequencer.raft.messages import (
    CHUNK_BYTES_MAX,
    NO_ID,
    Adopt,
    Append,
    AskState,
    Chunk,
    ChunkReply,
    Claim,
    Entry,
    Forward,
    Hello,
    Message,
    Place,
    StatePiece,
    Tell,
)
from sequencer.raft.network import Network
from sequencer.raft.opening import adopt_cluster, check_members, joined_identity, open_directory
from sequencer.raft.proposals import Proposals, Route
from sequencer.raft.snapshots import Incoming, SnapshotMeta, SnapshotReader
from sequencer.raft.state import ClusterState, Ended, decode_state, encode_state, initial_state
from sequencer.raft.stock import now

T = TypeVar("T")

SILENT_WAIT_S: Final = 1.0
"""So long the loop waits at most while it only waits for its disk."""
HOLD_FACTOR: Final = 8
"""For a follower that is being served, so many times the usual tail of the log is kept."""

logger = logging.getLogger("sequencer.raft")


class RaftNode:
    """One life of a member, from opening its directory to `close`. One thread steps it; see `Consensus`.

    `calls` are made by the loop between two calls of the machine; whoever adds one calls `wake` then.
    Opening raises what `open_directory` does, and what the network's `start` does.
    """

    def __init__(
        self,
        config: RaftConfig,
        machine: StateMachine,
        *,
        network: Network,
        aside: Aside,
        rng: random.Random,
        new_id: Callable[[], bytes],
        disk: Disk = REAL,
        on_disk_full: Callable[[DiskFull], None],
        on_leadership: Callable[[Leadership], None] = lambda _: None,
        on_told: Callable[[str, bytes], None] = lambda _peer, _content: None,
        calls: deque[Callable[[], None]] | None = None,
        fill_segments: bool = False,
    ) -> None:
        self._config, self._machine, self._network, self._aside = config, machine, network, aside
        self._new_id, self._disk, self._wait_for_space = new_id, disk, on_disk_full
        self._is_disk_full = False
        self._is_waiting = False
        self._can_submit = False
        self._calls = deque() if calls is None else calls
        self._on_leadership, self._on_told = on_leadership, on_told
        self._leadership = Leadership(None, 0, False)
        try:
            kept = self._kept = open_directory(config, disk, new_id, fill_segments=fill_segments)
            self._log, self._snapshots = kept.log, kept.snapshots
            self._identify(kept.identity)
            self.state: ClusterState = kept.state
            machine.restore(self.state.index, kept.machine_bytes, self._identity.cluster)
            kept.machine_bytes = b""
            self.proposals = Proposals(
                self._identity.disk,
                # Two nodes on copies of one disk, or one that was rolled back, are in the same life by count.
                self._identity.life << 32 | int.from_bytes(new_id()[:4]),
                commands_max=config.commands_max,
                bytes_max=config.command_bytes_max,
                retry_s=config.retry_ms / 1000,
            )
            self._hellos: dict[str, Hello] = {}
            self._connections: dict[str, int] = {}
            self._hand_overs: list[tuple[float, Future[bool]]] = []
            patience_s = PATIENCE_ELECTIONS * config.election_ms_max / 1000
            self._left_behind = LeftBehind(len(config.members), patience_s)
            self._leaving = Leaving(self._snapshots, aside, config.snapshot_ms / 1000)
            self._giving = Giving(self._snapshots)
            self._fetching = Fetching(self._snapshots, aside, self._send, self._installable, self._on_fetched)
            self._courted: tuple[bytes, int] | None = None
            """While blank: the cluster and the epoch whose leader this node follows."""
            self._admit_again_at: dict[str, float] = {}
            self._incoming: Incoming | None = None
            self._is_installing = False
            self._is_freezing = False
            self._snapshot_at = now() + config.snapshot_ms / 1000
            self._spare_at = 0.0
            self._raft = SyncObj(config, self, self._log, network, rng)
            self._log_opening()
            network.start(self, self._hello())
            self._try_bootstrap()
        except BaseException:
            self.close()
            raise

    # The loop

    def step(self) -> None:
        """One round: commit, apply, take commands, queue messages, sync, send, wait for what comes."""
        self._is_waiting = False
        self._aside.collect()
        if self._is_silent:
            if self._leaving.is_silent:
                self._leave()
            self._network.poll(self.wait_s())
            return
        self._raft.step()
        if self._hand_overs:
            self._settle_hand_overs()
        if self._leaving.is_over:
            self._leave()
        else:
            self._seek_state()
        raft, known = self._raft, self._leadership
        if known != (raft.leader, raft.term, self.is_leader):
            self._report(Leadership(raft.leader, raft.term, self.is_leader))

    @property
    def _is_silent(self) -> bool:
        """Whether nothing is said or heard: a later epoch's state is being made durable here.

        Once it is, whatever this disk promised in the present epoch meanwhile would be broken.
        """
        return self._leaving.is_silent or (self._fetching.is_installing and not self._identity.is_blank)

    def _report(self, leadership: Leadership) -> None:
        if leadership != self._leadership:
            self._leadership = leadership
            self._on_leadership(leadership)

    def wait_s(self) -> float:
        """How long a step may be put off if nothing arrives."""
        if self._is_silent:
            return max(0.0, min(SILENT_WAIT_S, self._leaving.due - now()))
        return self._raft.wait_s()

    def fail(self, error: BaseException) -> None:
        """Keep the helper from changing anything more: what failed must not be followed by anything."""
        self._snapshots.fail(error)

    def close(self) -> None:
        """Let go of disk and network, as they are: nothing more is synced or sent."""
        self._network.close()
        self._aside.close()
        if hasattr(self, "_giving"):
            self._giving.close()
        if hasattr(self, "_raft"):
            self._raft.close()
        if hasattr(self, "_kept"):
            self._kept.close()

    # What the protocol asks (hardened.Host)

    def submit(self) -> None:
        """Make the calls that were asked for; then hand over what is to be proposed now.

        That is nothing before there is a leader and this disk counts. What the calls propose, in answer to
        what was just applied, leaves together with the news of that.
        """
        while self._calls:
            self._calls.popleft()()
        raft = self._raft
        leader = raft.leader
        is_counted = raft.is_counted_here and not self._leaving.is_over
        self._can_submit = leader is not None and is_counted and not raft.is_handing_over
        if leader is None or not self._can_submit:
            return
        if self.proposals.in_flight:
            route = Route(leader, raft.term, self._connections.get(leader, 0))
            for content in self.proposals.take(route, raft.round_began):
                raft.submit(content)
        if leader == self._config.name:
            self._admit_disks()

    def on_commit(self, entry: Entry) -> None:
        """Apply a committed entry: to the cluster's state, then its commands to the machine."""
        applied = self.state.apply(entry)
        if applied is None:
            self._note_join(self.state)
            return
        if isinstance(applied, Ended):
            logger.warning("epoch_ends epoch=%s index=%d", name_of(self.state.epoch), entry.index)
            self._machine.apply(applied.index, applied.command)
            self._leaving.begin(self._raft.round_began)
            return
        if applied.first is not None:
            apply = self._machine.apply
            for index, command in enumerate(applied.pack.commands, applied.first):
                apply(index, command)
        self.proposals.on_applied(applied, self.state, self._raft.round_began)

    def on_forward(self, peer: str, forward: Forward) -> bool:
        """Whether it is what a node may ask for: commands of its own, that every node can apply."""
        try:
            content = decode_content(forward.content)
        except FormatError as error:
            logger.error("refused_commands peer=%s error=%r", peer, str(error))
            return False
        if isinstance(content, Commands):
            is_allowed = content.disk == self._hellos[peer].claim.disk
        else:
            is_allowed = isinstance(content, Reset) and content.epoch == self._identity.epoch
        if not is_allowed:
            logger.error("refused_commands peer=%s error='not its own'", peer)
        return is_allowed

    def on_disk_full(self, error: DiskFull) -> None:
        """Nothing has left this node since it could not be synced: to the others it is away."""
        if not self._is_disk_full:
            self._is_disk_full = True
            logger.error("disk_full error=%r", str(error))
            self._report(Leadership(None, self._raft.term, False))
        self._wait_for_space(error)

    def on_disk_space(self) -> None:
        """What waited is synced."""
        self._is_disk_full = False
        logger.info("disk_has_space")

    def _once_there_is_space(self, act: Callable[[], T]) -> T:
        while True:
            try:
                result = act()
            except DiskFull as error:
                self.on_disk_full(error)
            else:
                if self._is_disk_full:
                    self.on_disk_space()
                return result

    def due(self) -> float:
        """When something here wants the loop to go round, which waits for that now."""
        self._is_waiting = True
        if self._calls:
            return 0.0
        due = self.proposals.due() if self._can_submit else float("inf")
        if self._hand_overs:
            due = min(due, *(until for until, _ in self._hand_overs))
        due = min(due, self._leaving.due)
        return min(due, self._snapshot_at) if self._is_snapshot_wanted() else due

    def housekeeping(self) -> None:
        """Take a snapshot when it is time; give up one that was being received and is not needed any more.

        And have the log's next file made ahead.
        """
        incoming = self._incoming
        if (
            incoming is not None
            and not self._is_installing
            and incoming.meta.place.index <= self.state.applied.index
        ):
            incoming.abandon()
            self._incoming = None
        began = self._raft.round_began
        self._giving.forget_idle(began)
        if began >= self._snapshot_at and self._is_snapshot_wanted():
            self._take_snapshot()
        if began >= self._spare_at and (prepare := self._log.prepare_spare()) is not None:
            self._aside.run(prepare, lambda _: None, self._on_spare_failed)

    def open_snapshot(self) -> SnapshotReader:
        """The newest one."""
        return self._snapshots.open_newest()

    # Handing over

    def hand_over(self, timeout_s: float, done: Future[bool]) -> None:
        """See `Consensus.hand_over`; on the loop's thread. `done` gets the answer."""
        raft = self._raft
        if not raft.leads:
            _answer(done, raft.leader is not None)
            return
        until = now() + timeout_s
        raft.hand_over(until)
        self._hand_overs.append((until, done))

    def _settle_hand_overs(self) -> None:
        leader, waiting = self._raft.leader, []
        for until, done in self._hand_overs:
            if leader not in {None, self._config.name}:
                _answer(done, True)
            elif self._raft.round_began >= until:
                _answer(done, False)
            else:
                waiting.append((until, done))
        self._hand_overs = waiting

    # Resets

    def is_over(self) -> bool:
        """Whether this epoch has ended here."""
        return self._leaving.is_over

    def reset(self, command: bytes) -> None:
        """See `Consensus.reset`."""
        epoch = self._identity.epoch
        if not may_be_reset(epoch):
            logger.error("refused_reset epoch=%s error='the last one of its line'", name_of(epoch))
        elif self._can_submit:
            self._raft.submit(encode_reset(Reset(epoch, command)))

    def _new_disks(self) -> dict[str, bytes]:
        """The disks of connected members that were wiped, and do not count yet.

        One whose join is committed is none, whether or not it has said that it knows: it may have promised
        something in this epoch, and would not follow into another.
        """
        return {
            peer: hello.claim.disk
            for peer, hello in self._hellos.items()
            if hello.cluster == NO_ID or (self._is_of_this_epoch(hello) and not self._may_count(peer, hello))
        }

    def _may_count(self, peer: str, hello: Hello) -> bool:
        known = self.state.disks.get(peer)
        is_named = known is not None and known.disk == hello.claim.disk
        return is_named or bool(self._raft.is_counted(peer))

    def _voters(self) -> list[str]:
        """Members that are here, and that can elect a leader of this epoch."""
        peers = [
            peer
            for peer, hello in self._hellos.items()
            if self._is_of_this_epoch(hello) and self._raft.is_counted(peer)
        ]
        return [self._config.name, *peers] if self._raft.is_counted_here else peers

    def force(self, command: bytes) -> NoMajority | None:
        """See `Consensus.force`."""
        leaving, config, own = self._leaving, self._config, self._identity
        if leaving.is_over:
            return None if leaving.forced == command else is_ending(config.directory)
        new = self._new_disks()
        why_not = refusal(config, own.epoch, new, self._voters(), is_blank=own.is_blank)
        if why_not is not None:
            return why_not
        self._raft.fall_silent()
        self._raft.apply_all()  # It may hold a reset of which nobody knows whether it was committed, too.
        self.state.index += 1
        self._machine.apply(self.state.index, command)
        disks = new | {config.name: own.disk}
        state = forced_epoch(self.state, self._machine.digest(), disks, self._new_id())
        logger.critical("forces_epoch epoch=%s disks=%s", name_of(state.epoch), ",".join(sorted(disks)))
        leaving.force(command, state, self._machine.snapshot(), now())
        self._report(Leadership(None, self._raft.term, False))
        return None

    def _leave(self) -> None:
        """Go on in the next epoch, once nobody in this one waits for word of its end."""
        began = now()
        is_awaited = self._raft.leads and any(map(self._is_of_this_epoch, self._hellos.values()))
        if not self._leaving.is_to_leave(began, is_awaited=is_awaited):
            return
        if self._leaving.is_begun:
            self._leaving.write_again(began)
        else:
            state = next_epoch(self.state, self._machine.digest())
            logger.warning("leaves_epoch epoch=%s chain=%08x", name_of(self.state.epoch), state.chain)
            self._leaving.write(state, self._machine.snapshot(), began)

    def _is_of_this_epoch(self, hello: Hello) -> bool:
        own = self._identity
        return hello.cluster == own.cluster and hello.epoch == own.epoch

    def _seek_state(self) -> None:
        """Ask for the state of a later epoch, if this one is not to be waited for; a blank disk for any."""
        peers: list[str] = []
        if self._is_installing:
            return
        raft, behind = self._raft, self._left_behind
        if self._identity.is_blank:
            is_over = raft.leaderless_s > behind.patience_s
            peers = sorted(peer for peer, hello in self._hellos.items() if hello.cluster != NO_ID)
            peers = peers if is_over else []
        elif behind.elsewhere:
            self._check_is_followed()
            own, is_bound = self._identity.epoch, raft.is_counted_here
            peers = behind.whom_to_ask(own, raft.leaderless_s, is_bound=is_bound)
        if peers:
            if self._incoming is not None:
                self._incoming.abandon()
                self._incoming = None
            self._fetching.ask(peers, now())

    def _give_state(self, peer: str, hello: Hello, asks: AskState) -> None:
        """Answer a peer of an earlier epoch, or a blank one whose disk the cluster counts on."""
        own, newest = self._identity, self._snapshots.newest
        is_here = hello.cluster == own.cluster
        is_new = hello.cluster == NO_ID or (is_here and is_later(hello.epoch, own.epoch))
        may_have = is_here and is_succeeded(hello.epoch, own.epoch)
        may_have = may_have or (is_new and self._is_counted_on(peer, hello))
        if newest is not None and newest.epoch == own.epoch and may_have:
            piece = self._giving.piece_for(peer, asks, now())
            if piece is not None:
                self._send(peer, piece)

    def _is_counted_on(self, peer: str, hello: Hello) -> bool:
        """Whether the newest snapshot names that disk a member: else the leader sends a newer one."""
        newest, known = self._snapshots.newest, self.state.disks.get(peer)
        if newest is None or known is None or known.disk != hello.claim.disk:
            return False
        return newest.place.index >= known.joined.index

    def _on_fetched(self, fetched: Fetched) -> None:
        if not self._identity.is_blank:
            raise EpochOver(fetched.meta.epoch)
        self._become(fetched.state, fetched.machine_bytes)

    def _send(self, peer: str, message: Message) -> None:
        self._network.send(peer, message)

    # What arrives (network.Receiver)

    def on_up(self, peer: str, hello: Hello) -> None:
        """Hear who it is; talk to it if it is of this cluster, or blank as long as one of us is."""
        self._hellos[peer] = hello
        self._connections[peer] = self._connections.get(peer, 0) + 1
        if self._is_silent or not self._is_of_this_cluster(peer, hello):
            return
        self._raft.on_up(peer, hello.claim)
        if hello.cluster == NO_ID:
            self._offer_adoption(peer, hello)
            self._try_bootstrap()

    def on_message(self, peer: str, message: Message) -> None:
        """Give it to the protocol, unless the peer is a stranger."""
        hello = self._hellos.get(peer)
        if hello is None or self._is_silent:
            return
        if isinstance(message, AskState):
            self._give_state(peer, hello, message)
        elif isinstance(message, StatePiece):
            if self._may_follow(hello.epoch):
                self._fetching.on_piece(peer, hello, message, now())
        elif not self._is_talked_to(hello) or not self._is_heeded(hello, message):
            return
        elif isinstance(message, Tell):
            self._on_told(peer, message.content)
        else:
            self._raft.on_message(peer, message)

    def on_down(self, peer: str) -> None:
        """Forget what it said."""
        self._hellos.pop(peer, None)
        self._left_behind.elsewhere.pop(peer, None)
        self._raft.on_down(peer)  # Whatever it is now: it may have been talked to while this node was blank.

    def _is_talked_to(self, hello: Hello) -> bool:
        own = self._identity
        is_same = hello.cluster == own.cluster and hello.epoch == own.epoch
        return is_same or NO_ID in (hello.cluster, own.cluster)

    def _is_heeded(self, hello: Hello, message: Message) -> bool:
        """Whether a blank node takes part in the epoch that this comes from: in one, as long as it is led.

        Of leaders of two epochs it would learn that there are two in one term.
        """
        if not self._identity.is_blank or hello.cluster == NO_ID:
            return True
        theirs = (hello.cluster, hello.epoch)
        if theirs != self._courted and isinstance(message, Append | Chunk):
            is_led = self._raft.leaderless_s <= self._left_behind.patience_s
            if self._courted is None or not is_led:
                self._courted = theirs
                self._raft.forget_leader()
        return theirs == self._courted or not isinstance(message, Append | Chunk)

    def _is_of_this_cluster(self, peer: str, hello: Hello) -> bool:
        own = self._identity
        if self._is_talked_to(hello):
            return True
        is_here = hello.cluster == own.cluster
        if is_here and (is_later(own.epoch, hello.epoch) or is_rival(own.epoch, hello.epoch)):
            self._left_behind.elsewhere[peer] = hello.epoch
        is_grave = not is_here or is_rival(own.epoch, hello.epoch)
        logger.log(
            logging.ERROR if is_grave else logging.WARNING,
            "refused_peer peer=%s cluster=%s epoch=%s own_cluster=%s own_epoch=%s",
            *(peer, hello.cluster.hex(), name_of(hello.epoch), own.cluster.hex(), name_of(own.epoch)),
        )
        return False

    def _may_follow(self, epoch: int) -> bool:
        """Whether to go on in that epoch. It is asked with each piece: the disk may have come to count."""
        own = self._identity.epoch
        if self._identity.is_blank or is_succeeded(own, epoch):
            return True
        return is_later(own, epoch) and not self._raft.is_counted_here

    def _check_is_followed(self) -> None:
        """`rt.ClusterMismatch` if the cluster goes on in an epoch that was forced without this node.

        A disk that does not count in its own epoch has promised nothing there, and follows into a later one.
        """
        own = self._identity.epoch
        without = self._left_behind.forced_without(own)
        if without and (self._raft.is_counted_here or is_rival(own, next(iter(without.values())))):
            epochs = sorted({name_of(epoch) for epoch in without.values()})
            raise ClusterMismatch(
                "an operator had the cluster go on from another node's state, without this one",
                where=self._config.directory,
                got=f"epoch {name_of(own)}",
                wanted=f"epoch {', '.join(epochs)}, as {', '.join(sorted(without))} say",
                hint="Empty the node's Raft and data directories, and start it: it joins again.",
            )

    # A new cluster, a new disk (rule 6)

    def _hello(self) -> Hello:
        own = self._identity
        return Hello(own.cluster, own.epoch, own.claim, self._config.bootstrap and own.is_blank)

    def _try_bootstrap(self) -> None:
        """Make the cluster if all members are here and blank, and nobody with a lower name wants to."""
        if not (self._config.bootstrap and self._identity.is_blank) or self._is_installing:
            return  # Where a state is being fetched somebody is not blank.
        hellos = {peer: self._hellos.get(peer) for peer in self._config.peers}
        for peer, hello in hellos.items():
            if hello is None or hello.cluster != NO_ID or peer not in self._network.connected:
                return
            if hello.wants_bootstrap and peer < self._config.name:
                return
        disks = {peer: hello.claim.disk for peer, hello in hellos.items() if hello is not None}
        state = initial_state(self._new_id(), 1, disks | {self._config.name: self._identity.disk})
        logger.info("bootstraps cluster=%s members=%s", state.cluster.hex(), ",".join(sorted(state.disks)))
        self._become_member(state, encode_state(state))

    def _offer_adoption(self, peer: str, hello: Hello) -> None:
        """A blank disk that the cluster counts on gets a snapshot: without one it may not vote.

        It has never voted or acknowledged, so any will do. A large one only a leader sends, in pieces.
        """
        newest = self._snapshots.newest
        if newest is not None and newest.length <= CHUNK_BYTES_MAX and self._is_counted_on(peer, hello):
            self._raft.send(peer, Adopt(self._snapshots.read()))

    def on_adopt(self, peer: str, adopt: Adopt) -> None:
        """Become a member of the cluster, if it names this disk."""
        if not self._identity.is_blank or self._is_installing or self._fetching.is_installing:
            return
        try:
            state, _ = decode_state(adopt.content)
            check_members(self._config, state)
        except (FormatError, ClusterMismatch) as error:
            logger.error("refused_adoption peer=%s error=%r", peer, str(error))
            return
        known, hello = state.disks.get(self._config.name), self._hellos[peer]
        is_peers = (state.cluster, state.epoch) == (hello.cluster, hello.epoch)
        if known is None or known.disk != self._identity.disk or not is_peers:
            logger.error("refused_adoption peer=%s cluster=%s", peer, state.cluster.hex())
            return
        logger.info("adopts cluster=%s peer=%s", state.cluster.hex(), peer)
        self._become_member(state, adopt.content)

    def _become_member(self, state: ClusterState, content: bytes) -> None:
        """Each step is durable before the next, and opening the directory goes on from any of them."""
        self._once_there_is_space(
            lambda: self._snapshots.write(state.cluster, state.epoch, state.applied, content)
        )
        self._become(state, decode_state(content)[1])

    def _become(self, state: ClusterState, machine_bytes: bytes) -> None:
        """Take over the state of the newest snapshot, which is above everything that was applied."""
        is_new = self._identity.is_blank
        if is_new:
            blank = self._identity
            self._identify(
                self._once_there_is_space(
                    lambda: adopt_cluster(self._config, self._disk, blank, state.cluster, state.epoch)
                )
            )
        self._note_join(state)
        self.state = state
        self._raft.on_installed(state.applied)
        self._machine.restore(state.index, machine_bytes, state.cluster)
        self.proposals.on_restored(state, now())
        if is_new:
            self._network.introduce(self._hello())

    def _note_join(self, state: ClusterState) -> None:
        """Keep where this disk was admitted, if the state says so."""
        identity = self._identity
        self._identify(
            self._once_there_is_space(lambda: joined_identity(self._config, self._disk, identity, state))
        )

    def _identify(self, identity: DiskIdentity) -> None:
        self._identity = identity
        self.claim: Claim = identity.claim
        """This disk, and the join it has applied."""

    def _admit_disks(self) -> None:
        """As leader: have each disk committed that speaks for a member and is not the one that counts."""
        for join in self._raft.unknown_disks():
            # One for each member in an election timeout: copies of a disk that take turns cost no more.
            if now() >= self._admit_again_at.get(join.name, 0.0):
                self._admit_again_at[join.name] = now() + self._config.election_ms_max / 1000
                logger.warning("admits_disk member=%s disk=%s", join.name, join.disk.hex())
                self._raft.admit(join)

    # Snapshots (rule 3)

    def _is_snapshot_wanted(self) -> bool:
        newest = self._snapshots.newest
        return (
            newest is not None
            and self.state.applied.index > newest.place.index
            and not self._is_freezing
            and not self._is_installing
            and not self._leaving.is_over
            and not self._fetching.is_under_way
            and self._incoming is None
        )

    def _take_snapshot(self) -> None:
        state, place = self.state, self.state.applied
        head, encode = encode_state(state), self._machine.snapshot()
        self._is_freezing = True

        def write() -> SnapshotMeta:
            return self._snapshots.write(state.cluster, state.epoch, place, b"".join([head, encode()]))

        self._aside.run(write, self._on_snapshot, self._on_snapshot_failed)

    def _on_snapshot(self, meta: SnapshotMeta) -> None:
        self._is_freezing = False
        self._snapshot_at = now() + self._config.snapshot_ms / 1000
        self._compact(meta.place)

    def _compact(self, place: Place) -> None:
        """Let go of what the snapshot covers, but for a tail that spares slow followers the snapshot.

        What a connected follower needs next is kept within a wider bound: else one that is slower than the
        log grows would get snapshot after snapshot and never the log behind one.
        """
        log, config, size = self._log, self._config, 0
        needed = self._raft.keep_from() or place.index + 1
        keep_from = place.index + 1
        while keep_from > log.base.index + 1:
            size += len(log.entry(keep_from - 1).content)
            kept = place.index - keep_from + 2
            held = max(size / config.keep_bytes, kept / config.keep_entries)
            if held > (1 if keep_from <= needed else HOLD_FACTOR):
                break
            keep_from -= 1
        try:
            log.compact(keep_from)
        except DiskFull as error:  # Some file systems need space to free some; the next snapshot tries again.
            logger.error("compaction_failed error=%r", str(error))

    def _on_snapshot_failed(self, error: BaseException) -> None:
        self._is_freezing = False
        if not isinstance(error, DiskFull):
            raise error
        logger.error("snapshot_failed error=%r", str(error))
        self._snapshot_at = now() + self._config.snapshot_ms / 1000

    def on_chunk(self, peer: str, chunk: Chunk) -> None:
        """Take a piece of the leader's snapshot; the whole of it is made durable aside."""
        hello = self._hellos[peer]
        meta = SnapshotMeta(hello.cluster, hello.epoch, chunk.snapshot, chunk.length, chunk.digest)
        if hello.cluster == NO_ID or self._fetching.is_installing:
            return  # A blank peer leads nobody.
        self._fetching.give_up()
        reached = chunk.offset + len(chunk.data)
        if self._is_installing:
            if self._incoming is not None and self._incoming.meta == meta:
                self._acknowledge(peer, chunk.term, meta, reached, self._incoming.received)
            return
        try:
            if self._incoming is None or self._incoming.meta != meta:
                self._incoming = self._snapshots.receive(meta)
            incoming = self._incoming
            received = incoming.write(chunk.offset, chunk.data)
        except (FormatError, DiskFull) as error:
            self._on_install_failed(error)
            return
        self._acknowledge(peer, chunk.term, meta, reached, received)
        if received == meta.length:
            self._is_installing = True
            found: list[tuple[ClusterState, bytes]] = []
            self._aside.run(
                lambda: incoming.finish(lambda content: found.append(self._installable(meta, content))),
                lambda _: self._on_installed(peer, chunk.term, meta, *found[0]),
                self._on_install_failed,
            )

    def _installable(self, meta: SnapshotMeta, content: bytes) -> tuple[ClusterState, bytes]:
        """The state in a leader's snapshot; `rt.FormatError` or `rt.ClusterMismatch` if it is another."""
        state, machine_bytes = decode_state(content)
        if (state.cluster, state.epoch, state.applied) != (meta.cluster, meta.epoch, meta.place):
            raise FormatError("a snapshot holds another state than its leader said", got=state.applied)
        check_members(self._config, state)
        return state, machine_bytes

    def _acknowledge(
        self, peer: str, term: int, meta: SnapshotMeta, reached: int, received: int, *, is_all: bool = False
    ) -> None:
        self._raft.send(peer, ChunkReply(term, meta.place, reached, received, is_all, self.claim))

    def _on_installed(
        self, peer: str, term: int, meta: SnapshotMeta, state: ClusterState, machine_bytes: bytes
    ) -> None:
        self._incoming, self._is_installing = None, False
        if meta.place.index <= self._raft.committed:
            return  # The log was quicker.
        logger.info("installed_snapshot index=%d bytes=%d", meta.place.index, meta.length)
        self._become(state, machine_bytes)
        self._acknowledge(peer, term, meta, meta.length, meta.length, is_all=True)

    def _on_spare_failed(self, error: BaseException) -> None:
        """The log goes on without."""
        if not isinstance(error, StorageError):
            raise error
        logger.error("no_spare_segment error=%r", str(error))
        self._spare_at = now() + self._config.snapshot_ms / 1000

    def _on_install_failed(self, error: BaseException) -> None:
        """The leader sends it again; a failed disk ends the node."""
        incoming, self._incoming, self._is_installing = self._incoming, None, False
        if not isinstance(error, FormatError | ClusterMismatch | DiskFull):
            raise error
        logger.error("install_failed error=%r", str(error))
        if incoming is not None:
            incoming.abandon()

    # How things stand

    def status(self, *, is_stopped: bool = False) -> Status:
        """May be asked from any thread; the parts may be an instant apart."""
        raft, state, config = self._raft, self.state, self._config
        log, newest = self._log, self._snapshots.newest
        role = raft.role if raft.is_counted_here else "joining"
        return Status(
            name=config.name,
            role="stopped" if is_stopped else "stalled" if self._is_away else role,
            leader=None if is_stopped else self.leader,
            term=raft.term,
            cluster="" if self._identity.is_blank else self._identity.cluster.hex(),
            epoch=number_of(self._identity.epoch),
            epoch_id=self._identity.epoch,
            index=state.index,
            log_start=log.base.index + 1,
            log_end=log.last.index + 1,
            committed=raft.committed,
            applied=state.applied.index,
            chain=state.chain,
            snapshot=newest.place.index if newest is not None else 0,
            in_flight=self.proposals.in_flight,
            members=tuple(self._member_status(name) for name in sorted(config.members)),
            leader_committed=raft.leader_committed,
            received=self._received(),
        )

    def _received(self) -> tuple[int, int] | None:
        incoming = self._incoming or self._fetching.incoming
        return None if incoming is None else (incoming.received, incoming.meta.length)

    def _member_status(self, name: str) -> MemberStatus:
        raft, is_self = self._raft, name == self._config.name
        claim = self.state.disks.get(name)
        return MemberStatus(
            name=name,
            address=self._config.members[name],
            is_self=is_self,
            is_connected=is_self or name in self._network.connected,
            disk=claim.disk.hex() if claim is not None else "",
            is_counted=raft.is_counted_here if is_self else raft.is_counted(name),
            match_index=self._log.synced.index
            if is_self and raft.role == "leader"
            else raft.match_index(name),
        )

    @property
    def name(self) -> str:
        """This member."""
        return self._config.name

    @property
    def leader(self) -> str | None:
        """The member that leads, as far as this node knows."""
        return None if self._is_away else self._raft.leader

    @property
    def _is_away(self) -> bool:
        """Whether nothing leaves this node, for want of space or as it is on its way elsewhere."""
        return self._is_disk_full or self._is_silent

    @property
    def is_leader(self) -> bool:
        """Whether it is this one, and it has applied all that was committed in earlier terms."""
        return self._raft.leads and self.is_caught_up and not self._is_away

    def propose(self, command: bytes) -> Future[int]:
        """See `Consensus.propose`; any thread."""
        future = self.proposals.add(command)
        if self._is_waiting and self.proposals.due() == 0.0:
            self.wake()
        return future

    def wake(self) -> None:
        """See to it that the loop looks for commands and calls; any thread, behind adding one.

        Nothing is to be done unless the loop said that it waits, and then once. It looks after it said so:
        one of the two sees the other.
        """
        if self._is_waiting:
            self._is_waiting = False
            self._network.wake()

    def tell(self, peer: str, content: bytes) -> bool:
        """See `Consensus.tell`."""
        hello = self._hellos.get(peer)
        is_known = hello is not None and not self._is_silent and self._is_talked_to(hello)
        return is_known and self._network.send(peer, Tell(content))

    @property
    def is_caught_up(self) -> bool:
        """Whether an entry of the present term was applied: all that earlier terms committed is applied."""
        return self.state.applied.term == self._raft.term

    def _log_opening(self) -> None:
        own, cut = self._identity, self._log.cut
        logger.info(
            "opened name=%s disk=%s life=%d cluster=%s epoch=%s snapshot=%d log_end=%d term=%d",
            *(own.name, own.disk.hex(), own.life, own.cluster.hex(), name_of(own.epoch)),
            *(self.state.applied.index, self._log.last.index + 1, self._log.term),
        )
        if cut is not None:
            logger.warning("cut_torn_tail path=%r offset=%d bytes=%d", *cut[:3])
        if any(claim.disk == NO_ID for claim in self.state.disks.values()) and not own.is_blank:
            missing = sorted(name for name, claim in self.state.disks.items() if claim.disk == NO_ID)
            logger.warning("members_without_disk names=%s", ",".join(missing))


def _answer(done: Future[bool], is_so: bool) -> None:
    with contextlib.suppress(InvalidStateError):  # Given up by its owner.
        done.set_result(is_so)
