"""A member of the cluster: the protocol, its disk, its network and its proposals, in one loop.

`RaftNode` is the loop without a thread, so that a simulation can step it; `Raft` runs it in a thread. This
module defines the order of the steps and dispatches messages; its parts handle them.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from rt.cluster_epoch import name_of
from rt.errors import DiskFull, FormatError, StorageError
from rt.log.disk import REAL, Disk
from sequencer.raft.core.core import PATIENCE_ELECTIONS, SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.core.ports import Network
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.bootstrap import Bootstrap
from sequencer.raft.lifecycle.epoch_transition import EpochExit, EpochTransition
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller, installable
from sequencer.raft.lifecycle.peers import Peers
from sequencer.raft.lifecycle.snapshotter import Snapshotter
from sequencer.raft.lifecycle.state_fetch import FetchedState, StateFetcher
from sequencer.raft.lifecycle.state_server import StateServer
from sequencer.raft.lifecycle.transfer_waiters import TransferWaiters
from sequencer.raft.model.api import Leadership, StateMachine, Status
from sequencer.raft.model.cluster_state import ClusterState, EpochEnded
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import Commands, ResetEntry, decode_content
from sequencer.raft.model.epochs import EpochLeft, EpochOver, NoMajority
from sequencer.raft.model.messages import (
    NO_ID,
    Admit,
    AppMessage,
    DiskClaim,
    FetchState,
    FetchStateChunk,
    Forward,
    Hello,
    InstallSnapshot,
    Message,
    RaftEntry,
)
from sequencer.raft.proposals import Proposals, Route
from sequencer.raft.status import status_of
from sequencer.raft.storage.disk_full import DiskSpace
from sequencer.raft.storage.open_directory import RaftDirectory, open_directory
from sequencer.raft.storage.snapshots import SnapshotReader
from sequencer.raft.storage.worker import BackgroundWorker

SILENT_WAIT_S: Final = 1.0
"""Maximum wait of the loop while it only waits for its disk."""

logger = logging.getLogger("sequencer.raft")


class RaftNode:
    """One run of a member, from opening its directory to `close`. One thread steps it; see `Consensus`.

    The loop runs `calls` between two calls of the machine. Call `wake` after adding one.
    Opening raises what `open_directory` does, and what the network's `start` does.
    """

    def __init__(
        self,
        config: RaftConfig,
        machine: StateMachine,
        *,
        network: Network,
        aside: BackgroundWorker,
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
        self._calls = deque() if calls is None else calls
        self._on_leadership, self._on_told = on_leadership, on_told
        self._leadership = Leadership(None, 0, False)
        self._is_waiting = False
        self._can_submit = False
        self._spare_at = 0.0
        try:
            kept = self._kept = open_directory(config, disk, new_id, fill_segments=fill_segments)
            self._log, self._snapshots = kept.log, kept.snapshots
            self._space = DiskSpace(on_disk_full, self._on_disk_full)
            self._own = LocalMembership(config, disk, self._space, kept.identity, kept.state)
            machine.restore(kept.state.index, kept.machine_bytes, kept.identity.cluster)
            kept.machine_bytes = b""
            self.proposals = _proposals(config, kept, new_id)
            self._raft = SyncObj(config, self, self._own, self._log, network, self._space, rng)
            self._make_parts(new_id)
            self._log_opening()
            network.start(self, self._own.hello())
            self._joining.try_bootstrap()
        except BaseException:
            self.close()
            raise

    def _make_parts(self, new_id: Callable[[], bytes]) -> None:
        config, machine, aside, send = self._config, self._machine, self._aside, self._network.send
        own, raft, snapshots = self._own, self._raft, self._snapshots
        behind = EpochLeft(len(config.members), PATIENCE_ELECTIONS * config.election_ms_max / 1000)
        self._peers = Peers(own, raft, behind)
        self._hand_overs = TransferWaiters(config.name, raft)
        self._leaving = EpochExit(snapshots, aside, config.snapshot_ms / 1000)
        self._giving = StateServer(snapshots)
        self._fetching = StateFetcher(
            snapshots,
            aside,
            send,
            lambda meta, content: installable(config, meta, content),
            self._on_fetched,
        )
        self._installing = SnapshotInstaller(
            config, own, raft, snapshots, aside, self._fetching, self._become
        )
        self._freezing = Snapshotter(
            config,
            own,
            machine,
            raft,
            self._log,
            snapshots,
            aside,
            self._leaving,
            self._fetching,
            self._installing,
        )
        self._joining = Bootstrap(
            config,
            own,
            raft,
            self._peers,
            self._network,
            snapshots,
            self._space,
            self._installing,
            self._fetching,
            new_id,
            self._become,
        )
        self._succession = EpochTransition(
            config,
            own,
            machine,
            raft,
            self._peers,
            behind,
            snapshots,
            leaving=self._leaving,
            giving=self._giving,
            fetching=self._fetching,
            installing=self._installing,
            new_id=new_id,
            send=send,
        )

    # The loop

    def step(self) -> None:
        """One round: commit, apply, take commands, queue messages, sync, send, wait for what comes."""
        self._is_waiting = False
        self._aside.collect()
        if self._succession.is_silent:
            if self._leaving.is_silent:
                self._succession.leave()
            self._network.poll(self.wait_s())
            return
        self._raft.step()
        if self._hand_overs.waiting:
            self._hand_overs.settle()
        if self._leaving.is_over:
            self._succession.leave()
        else:
            self._succession.seek_state()
        raft, known = self._raft, self._leadership
        if known != (raft.leader, raft.term, self.is_leader):
            self._report(Leadership(raft.leader, raft.term, self.is_leader))

    def _report(self, leadership: Leadership) -> None:
        if leadership != self._leadership:
            self._leadership = leadership
            self._on_leadership(leadership)

    def _on_disk_full(self) -> None:
        """Nothing has left this node since it could not be synced: to the others it is away."""
        self._report(Leadership(None, self._raft.term, False))

    def wait_s(self) -> float:
        """How long a step may be put off if nothing arrives."""
        if self._succession.is_silent:
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

    # What the protocol asks (host.Host)

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
            route = Route(leader, raft.term, self._peers.connections.get(leader, 0))
            for content in self.proposals.take(route, raft.round_began):
                raft.submit(content)
        if leader == self._config.name:
            self._joining.admit_disks()

    def on_commit(self, entry: RaftEntry) -> None:
        """Apply a committed entry: to the cluster's state, then its commands to the machine."""
        state = self._own.state
        applied = state.apply(entry)
        if applied is None:
            self._own.note_join(state)
            return
        if isinstance(applied, EpochEnded):
            logger.warning("epoch_ending epoch=%s index=%d", name_of(state.epoch), entry.index)
            self._machine.apply(applied.index, applied.command)
            self._leaving.begin(self._raft.round_began)
            return
        if applied.first is not None:
            apply = self._machine.apply
            for index, command in enumerate(applied.pack.commands, applied.first):
                apply(index, command)
        self.proposals.on_applied(applied, state, self._raft.round_began)

    def is_over(self) -> bool:
        """Whether this epoch has ended here."""
        return self._leaving.is_over

    def on_chunk(self, peer: str, chunk: InstallSnapshot) -> None:
        """Take a piece of the leader's snapshot."""
        self._installing.on_chunk(peer, self._peers.hellos[peer], chunk)

    def on_adopt(self, peer: str, adopt: Admit) -> None:
        """Become a member of the cluster, if it names this disk."""
        self._joining.on_adopt(peer, self._peers.hellos[peer], adopt)

    def on_forward(self, peer: str, forward: Forward) -> bool:
        """Whether it is what a node may ask for: commands of its own, that every node can apply."""
        try:
            content = decode_content(forward.content)
        except FormatError as error:
            logger.error("commands_rejected peer=%s error=%r", peer, str(error))
            return False
        if isinstance(content, Commands):
            is_allowed = content.disk == self._peers.hellos[peer].claim.disk
        else:
            is_allowed = isinstance(content, ResetEntry) and content.epoch == self._own.identity.epoch
        if not is_allowed:
            logger.error("commands_rejected peer=%s error='not its own'", peer)
        return is_allowed

    def open_snapshot(self) -> SnapshotReader:
        """The newest one."""
        return self._snapshots.open_newest()

    def due(self) -> float:
        """When something here wants the loop to go round, which waits for that now."""
        self._is_waiting = True
        if self._calls:
            return 0.0
        due = self.proposals.due() if self._can_submit else float("inf")
        if self._hand_overs.waiting:
            due = min(due, self._hand_overs.due())
        due = min(due, self._leaving.due)
        return min(due, self._freezing.due) if self._freezing.is_wanted() else due

    def housekeeping(self) -> None:
        """Take a snapshot when it is time; give up one that was being received and is not needed any more.

        And have the log's next file made ahead.
        """
        if self._installing.incoming is not None:
            self._installing.give_up_overtaken()
        began = self._raft.round_began
        self._giving.forget_idle(began)
        if began >= self._freezing.due and self._freezing.is_wanted():
            self._freezing.take()
        if began >= self._spare_at and (prepare := self._log.prepare_spare()) is not None:
            self._aside.run(prepare, lambda _: None, self._on_spare_failed)

    def _on_spare_failed(self, error: BaseException) -> None:
        """The log goes on without."""
        if not isinstance(error, StorageError):
            raise error
        logger.error("no_spare_segment error=%r", str(error))
        self._spare_at = now() + self._config.snapshot_ms / 1000

    def _on_fetched(self, fetched: FetchedState) -> None:
        """Go on with a state that is durable here; behind a new start, if it is of a later epoch."""
        if not self._own.is_blank:
            raise EpochOver(fetched.meta.epoch)
        self._become(fetched.state, fetched.machine_bytes)

    def _become(self, state: ClusterState, machine_bytes: bytes) -> None:
        """Take over the state of the newest snapshot, which is above everything that was applied."""
        is_new = self._own.is_blank
        if is_new:
            self._own.adopt(state.cluster, state.epoch)
        self._own.note_join(state)
        self._own.state = state
        self._raft.on_installed(state.applied)
        self._machine.restore(state.index, machine_bytes, state.cluster)
        self.proposals.on_restored(state, now())
        if is_new:
            self._network.introduce(self._own.hello())

    # What arrives (network.Receiver)

    def on_up(self, peer: str, hello: Hello) -> None:
        """Hear who it is; talk to it if it is of this cluster, or blank as long as one of us is."""
        self._peers.on_up(peer, hello)
        if self._succession.is_silent or not self._peers.is_accepted(peer, hello):
            return
        self._raft.on_up(peer, hello.claim)
        if hello.cluster == NO_ID:
            self._joining.offer_adoption(peer, hello)
            self._joining.try_bootstrap()

    def on_message(self, peer: str, message: Message) -> None:
        """Give it to the protocol, unless the peer is a stranger."""
        hello = self._peers.hellos.get(peer)
        if hello is None or self._succession.is_silent:
            return
        if isinstance(message, FetchState):
            self._succession.give_state(peer, hello, message)
        elif isinstance(message, FetchStateChunk):
            self._succession.on_piece(peer, hello, message)
        elif not self._peers.is_talked_to(hello) or not self._peers.is_heeded(hello, message):
            return
        elif isinstance(message, AppMessage):
            self._on_told(peer, message.content)
        else:
            self._raft.on_message(peer, message)

    def on_down(self, peer: str) -> None:
        """Forget what it said."""
        self._peers.on_down(peer)
        self._raft.on_down(peer)  # Whatever it is now: it may have been talked to while this node was blank.

    # What the sequencer asks (consensus.Consensus)

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
        hello = self._peers.hellos.get(peer)
        is_known = hello is not None and not self._succession.is_silent and self._peers.is_talked_to(hello)
        return is_known and self._network.send(peer, AppMessage(content))

    def reset(self, command: bytes) -> None:
        """See `Consensus.reset`."""
        content = self._succession.reset(command)
        if content is not None and self._can_submit:
            self._raft.submit(content)

    def force(self, command: bytes) -> NoMajority | None:
        """See `Consensus.force`."""
        why_not = self._succession.force(command)
        if self._leaving.is_silent:
            self._report(Leadership(None, self._raft.term, False))
        return why_not

    def hand_over(self, timeout_s: float, done: Future[bool]) -> None:
        """See `Consensus.hand_over`; on the loop's thread. `done` gets the answer."""
        self._hand_overs.begin(timeout_s, done)

    # How things stand

    def status(self, *, is_stopped: bool = False) -> Status:
        """May be asked from any thread; the parts may be an instant apart."""
        raft = self._raft
        role = raft.role if raft.is_counted_here else "joining"
        return status_of(
            self._config,
            self._own,
            raft,
            self._log,
            role="stopped" if is_stopped else "stalled" if self._is_away else role,
            leader=None if is_stopped else self.leader,
            connected=self._network.connected,
            newest=self._snapshots.newest,
            incoming=self._installing.incoming or self._fetching.incoming,
            in_flight=self.proposals.in_flight,
        )

    @property
    def name(self) -> str:
        """This member."""
        return self._config.name

    @property
    def state(self) -> ClusterState:
        """The replicated state as of the last entry applied."""
        return self._own.state

    @property
    def claim(self) -> DiskClaim:
        """This disk, and the join it has applied."""
        return self._own.claim

    @property
    def leader(self) -> str | None:
        """The member that leads, as far as this node knows."""
        return None if self._is_away else self._raft.leader

    @property
    def is_leader(self) -> bool:
        """Whether it is this one, and it has applied all that was committed in earlier terms."""
        return self._raft.leads and self.is_caught_up and not self._is_away

    @property
    def is_caught_up(self) -> bool:
        """Whether an entry of the present term was applied: all that earlier terms committed is applied."""
        return self._own.state.applied.term == self._raft.term

    @property
    def _is_away(self) -> bool:
        """Whether nothing leaves this node, for want of space or as it is on its way elsewhere."""
        return self._space.is_full or self._succession.is_silent

    def _log_opening(self) -> None:
        own, cut, state = self._own.identity, self._log.cut, self._own.state
        logger.info(
            "opened name=%s disk=%s life=%d cluster=%s epoch=%s snapshot=%d log_end=%d term=%d",
            *(own.name, own.disk.hex(), own.life, own.cluster.hex(), name_of(own.epoch)),
            *(state.applied.index, self._log.last.index + 1, self._log.term),
        )
        if cut is not None:
            logger.warning("torn_tail_cut path=%r offset=%d bytes=%d", *cut[:3])
        if any(claim.disk == NO_ID for claim in state.disks.values()) and not own.is_blank:
            missing = sorted(name for name, claim in state.disks.items() if claim.disk == NO_ID)
            logger.warning("members_without_disk names=%s", ",".join(missing))


def _proposals(config: RaftConfig, kept: RaftDirectory, new_id: Callable[[], bytes]) -> Proposals:
    return Proposals(
        kept.identity.disk,
        # Two nodes on copies of one disk, or a disk that was rolled back, have the same run number.
        kept.identity.life << 32 | int.from_bytes(new_id()[:4]),
        commands_max=config.commands_max,
        bytes_max=config.command_bytes_max,
        retry_s=config.retry_ms / 1000,
    )
