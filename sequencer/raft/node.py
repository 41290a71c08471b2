"""A member of the cluster: the protocol, its disk, its network and its proposals, in one loop.

`RaftNode` is the loop without a thread, so that a simulation can step it; `Raft` runs it in a thread. This
module defines the order of the steps and dispatches messages; its parts handle them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from rt.cluster_epoch import name_of
from rt.errors import DiskFull
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.leadership_transfer import TransferWaiters
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.bootstrap import Bootstrap
from sequencer.raft.lifecycle.epoch_transition import EpochExit, EpochTransition
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller, decode_snapshot
from sequencer.raft.lifecycle.membership import Membership
from sequencer.raft.lifecycle.peers import Peers
from sequencer.raft.lifecycle.services import NodeEnvironment, NodeServices
from sequencer.raft.lifecycle.snapshotter import SegmentPreparer, Snapshotter
from sequencer.raft.lifecycle.state_transfer import StateFetcher, StateServer
from sequencer.raft.model.api import Leadership, StateMachine, Status
from sequencer.raft.model.cluster_state import ClusterState, EpochEnded
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.epochs import EpochLeft, EpochOver, NoMajority
from sequencer.raft.model.members import MemberChange, Members
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
    MemberList,
    Message,
    RaftEntry,
)
from sequencer.raft.proposals import Proposals, Route
from sequencer.raft.status import status_of
from sequencer.raft.storage.disk_full import DiskSpace
from sequencer.raft.storage.open_directory import open_directory
from sequencer.raft.storage.snapshots import SnapshotReader

SILENT_WAIT_S: Final = 1.0
"""Longest wait of the loop while it only waits for its disk."""

logger = logging.getLogger("sequencer.raft")


class RaftNode:
    """One run of a member, from opening its directory to `close`. One thread steps it; see `raft.Raft`.

    The loop runs `calls` between two calls of the machine. Call `wake` after adding one. Opening raises the
    errors of `open_directory` and of the network's `start`.
    """

    def __init__(
        self,
        config: RaftConfig,
        machine: StateMachine,
        environment: NodeEnvironment,
        *,
        on_disk_full: Callable[[DiskFull], None],
        on_leadership: Callable[[Leadership], None] = lambda _: None,
        on_app_message: Callable[[str, bytes], None] = lambda _peer, _content: None,
        on_members: Callable[[Members], None] = lambda _: None,
        calls: deque[Callable[[], None]] | None = None,
    ) -> None:
        network, disk, new_id = environment.network, environment.disk, environment.new_id
        self._config, self._machine = config, machine
        self._network, self._worker = network, environment.worker
        self._calls = deque() if calls is None else calls
        self._on_leadership, self._on_app_message = on_leadership, on_app_message
        self._leadership = Leadership(None, 0, False)
        self._is_waiting = self._can_submit = False
        try:
            kept = self._kept = open_directory(config, disk, new_id, fill_segments=environment.fill_segments)
            self._log, self._snapshots = kept.log, kept.snapshots
            self._space = DiskSpace(on_disk_full, self._on_disk_full)
            self._own = LocalMembership(config, disk, self._space, kept.identity, kept.state)
            machine.restore(kept.state.index, kept.machine_bytes, kept.identity.cluster)
            kept.machine_bytes = b""
            self.proposals = Proposals(config, kept.identity, new_id())
            self._raft = SyncObj(config, self, self._own, self._log, network, self._space, environment.rng)
            self._make_parts(new_id, on_members)
            kept.log_opening()
            network.start(self, self._own.hello())
            self._bootstrap.try_bootstrap()
        except BaseException:
            self.close()
            raise

    def _make_parts(self, new_id: Callable[[], bytes], on_members: Callable[[Members], None]) -> None:
        config, own, raft, snapshots = self._config, self._own, self._raft, self._snapshots
        services = NodeServices(
            *(config, own, self._machine, raft, self._log, snapshots),
            *(self._space, self._network, self._worker, new_id),
        )
        epoch_left = EpochLeft(raft.voter_disks.voters, config.patience_s)
        self._peers = peers = Peers(own, raft, epoch_left)
        self.membership = Membership(services, peers, epoch_left, on_members)
        self.transfers = TransferWaiters(config.name, raft, raft.leader_role.transfer_leadership)
        retry_s = config.snapshot_ms / 1000
        self._epoch_exit = EpochExit(snapshots, self._worker, retry_s)
        self._segment_preparer = SegmentPreparer(self._log, self._worker, retry_s)
        self._state_server = StateServer(snapshots)
        decode = partial(decode_snapshot, config, own.identity.disk, self._machine)
        self._state_fetcher = fetcher = StateFetcher(
            *(snapshots, self._worker, self._network.send, decode, self._on_fetched)
        )
        self._installer = installer = SnapshotInstaller(services, fetcher, self._adopt_state)
        self._snapshotter = Snapshotter(services, self._epoch_exit, fetcher, installer)
        self._bootstrap = Bootstrap(services, peers, installer, fetcher, self._adopt_state)
        self._epochs = EpochTransition(
            *(services, peers, epoch_left, self._epoch_exit, self._state_server, fetcher, installer)
        )

    # The loop

    def step(self) -> None:
        """One round: commit, apply, accept commands, queue messages, sync, send, wait for messages."""
        self._is_waiting = False
        self._worker.collect()
        if self._epochs.is_silent:
            if self._epoch_exit.is_silent:
                self._epochs.leave()
            self._network.poll(self.wait_s())
            return
        self._raft.step()
        self.membership.check()
        if self.transfers.waiting:
            self.transfers.answer()
        if self._epoch_exit.is_over:
            self._epochs.leave()
        else:
            self._epochs.seek_state()
        raft, known = self._raft, self._leadership
        if known != (raft.leader, raft.term, self.is_leader):
            self._report(Leadership(raft.leader, raft.term, self.is_leader))

    def _report(self, leadership: Leadership) -> None:
        if leadership != self._leadership:
            self._leadership = leadership
            self._on_leadership(leadership)

    def _on_disk_full(self) -> None:
        """Nothing was sent since the failed sync, so this node is not reachable for the others."""
        self._report(Leadership(None, self._raft.term, False))

    def wait_s(self) -> float:
        """How long the next step may be delayed if nothing arrives."""
        if self._epochs.is_silent:
            return max(0.0, min(SILENT_WAIT_S, self._epoch_exit.due - now()))
        return self._raft.wait_s()

    def fail(self, error: BaseException) -> None:
        """Stop the worker from changing files after a failure."""
        self._snapshots.fail(error)

    def close(self) -> None:
        """Release disk and network. Nothing more is synced or sent."""
        self._network.close()
        self._worker.close()
        if hasattr(self, "_state_server"):
            self._state_server.close()
        if hasattr(self, "_raft"):
            self._raft.leader_role.stop_sending()
        if hasattr(self, "_kept"):
            self._kept.close()

    # Called by the protocol (`core.ports.NodeCallbacks`)

    def submit(self) -> None:
        """Run the requested calls, then submit the commands that are to be proposed now.

        Nothing is submitted before there is a leader and this disk counts. Commands that the calls propose in
        response to applied commands are sent together with the new commit index.
        """
        while self._calls:
            self._calls.popleft()()
        raft = self._raft
        leader = raft.leader
        is_counted = raft.is_counted_here and not self._epoch_exit.is_over
        self._can_submit = leader is not None and is_counted and not raft.leader_role.is_transferring
        if leader is None or not self._can_submit:
            return
        if self.proposals.in_flight:
            route = Route(leader, raft.term, self._peers.connections.get(leader, 0))
            for content in self.proposals.next_entries(route, raft.round_began):
                raft.submit(content)
        if leader == self._config.name:
            self._bootstrap.admit_disks()

    def on_commit(self, entry: RaftEntry) -> None:
        """Apply a committed entry to the cluster's state, then its commands to the machine."""
        state = self._own.state
        applied = state.apply(entry)
        if applied is None:
            self._own.record_join(state)
            self.membership.on_entry(entry)
            return
        if isinstance(applied, EpochEnded):
            logger.warning("epoch_ending epoch=%s index=%d", name_of(state.epoch), entry.index)
            self._machine.apply(applied.index, applied.command)
            self._epoch_exit.start(self._raft.round_began)
            return
        if applied.first is not None:
            apply = self._machine.apply
            for index, command in enumerate(applied.pack.commands, applied.first):
                apply(index, command)
        self.proposals.on_applied(applied, state, self._raft.round_began)

    def is_over(self) -> bool:
        return self._epoch_exit.is_over

    def on_install_snapshot(self, peer: str, chunk: InstallSnapshot) -> None:
        self._installer.on_install_snapshot(peer, self._peers.hellos[peer], chunk)

    def on_forward(self, peer: str, forward: Forward) -> bool:
        return self._peers.may_propose(peer, forward)

    def open_snapshot(self) -> SnapshotReader:
        return self._snapshots.open_newest()

    def due(self) -> float:
        """When the loop must run next. The loop waits from now on."""
        self._is_waiting = True
        if self._calls:
            return 0.0
        due = self.proposals.due() if self._can_submit else float("inf")
        if self.transfers.waiting:
            due = min(due, self.transfers.due())
        due = min(due, self._epoch_exit.due)
        return min(due, self._snapshotter.due) if self._snapshotter.is_wanted() else due

    def housekeeping(self) -> None:
        """Take a snapshot when due, drop overtaken transfers, prepare the next segment file."""
        if self._installer.incoming is not None:
            self._installer.abandon_overtaken()
        began = self._raft.round_began
        self._state_server.release_idle(began)
        if began >= self._snapshotter.due and self._snapshotter.is_wanted():
            self._snapshotter.take_snapshot()
        self._segment_preparer.prepare(began)

    def _on_fetched(self, state: ClusterState, machine_bytes: bytes) -> None:
        """Adopt a durable state. If the state is of a later epoch, the node adopts it after a restart."""
        if not self._own.is_blank:
            raise EpochOver(state.epoch)
        self._adopt_state(state, machine_bytes)

    def _adopt_state(self, state: ClusterState, machine_bytes: bytes) -> None:
        """Adopt the state of the newest snapshot, which is above everything that was applied."""
        is_new = self._own.is_blank
        if is_new:
            self._own.adopt(state.cluster, state.epoch)
        self._own.record_join(state)
        self._own.state = state
        self._raft.on_installed(state.applied)
        self._machine.restore(state.index, machine_bytes, state.cluster)
        self.proposals.on_restored(state, now())
        self.membership.on_restored()
        if is_new:
            self._network.introduce(self._own.hello())

    # Called by the network (`core.ports.MessageReceiver`)

    def on_awake(self) -> None:
        self._is_waiting = False

    def on_up(self, peer: str, hello: Hello) -> None:
        """Talk to the peer if it is of this cluster, or while one of the two is blank."""
        self._peers.on_up(peer, hello)
        if self._epochs.is_silent or not self.membership.is_accepted(peer, hello):
            return
        self._raft.on_up(peer, hello.claim)
        if hello.cluster == NO_ID:
            self._bootstrap.offer_admission(peer, hello)
            self._bootstrap.try_bootstrap()

    def on_message(self, peer: str, message: Message) -> None:
        hello = self._peers.hellos.get(peer)
        if hello is None or self._epochs.is_silent:
            return
        if isinstance(message, MemberList):
            self.membership.on_member_list(peer, hello, message)
        elif isinstance(message, FetchState):
            self._epochs.serve_state(peer, hello, message)
        elif isinstance(message, FetchStateChunk):
            self._epochs.on_state_chunk(peer, hello, message)
        elif not self._peers.may_talk_to(hello) or not self._peers.is_followed(hello, message):
            return
        elif isinstance(message, AppMessage):
            self._on_app_message(peer, message.content)
        elif isinstance(message, Admit):
            self._bootstrap.on_admit(peer, hello, message)
        else:
            self._raft.on_message(peer, message)

    def on_down(self, peer: str) -> None:
        self._peers.on_down(peer)
        self._raft.on_down(peer)  # Always: the protocol may have talked to it while this node was blank.

    # Called by `raft.Raft`

    def propose(self, command: bytes) -> Future[int]:
        """See `Raft.propose`. Any thread may call this."""
        future = self.proposals.add(command)
        if self._is_waiting and self.proposals.due() == 0.0:
            self.wake()
        return future

    def wake(self) -> None:
        """Wake the loop after adding a command or a call. Any thread may call this.

        The network is woken only if the loop announced that it waits, and then once. The loop checks for work
        after announcing, so one of the two always sees the other.
        """
        if self._is_waiting:
            self._is_waiting = False
            self._network.wake()

    def send(self, peer: str, content: bytes) -> bool:
        hello = self._peers.hellos.get(peer)
        is_known = hello is not None and not self._epochs.is_silent and self._peers.may_talk_to(hello)
        return is_known and self._network.send(peer, AppMessage(content))

    def reset(self, command: bytes) -> None:
        content = self._epochs.reset(command)
        if content is not None and self._can_submit:
            self._raft.submit(content)

    def force(self, command: bytes) -> NoMajority | None:
        why_not = self._epochs.force(command)
        if self._epoch_exit.is_silent:
            self._report(Leadership(None, self._raft.term, False))
        return why_not

    def change_members(self, change: MemberChange, done: Future[None]) -> None:
        raft, is_held = self._raft, self._is_away or self.is_over()
        raft.member_changes.start(change, done, is_held=is_held or raft.leader_role.is_transferring)

    # Status

    def status(self, *, is_stopped: bool = False) -> Status:
        """Any thread may call this. Its parts may differ by a moment."""
        raft = self._raft
        role = raft.role if raft.is_counted_here else "joining"
        return status_of(
            *(self._config, self._own, raft, self._log),
            role="stopped" if is_stopped else "stalled" if self._is_away else role,
            leader=None if is_stopped else self.leader,
            connected=self._network.connected,
            newest=self._snapshots.newest,
            incoming=self._installer.incoming or self._state_fetcher.incoming,
            in_flight=self.proposals.in_flight,
        )

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def state(self) -> ClusterState:
        """The replicated state as of the last entry applied."""
        return self._own.state

    @property
    def claim(self) -> DiskClaim:
        return self._own.claim

    @property
    def leader(self) -> str | None:
        return None if self._is_away else self._raft.leader

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, and has applied everything that earlier terms committed."""
        return self._raft.leads and self.is_caught_up and not self._is_away

    @property
    def is_caught_up(self) -> bool:
        """See `FollowerRole.is_caught_up`."""
        return self._raft.follower_role.is_caught_up(self._own.state.applied)

    @property
    def _is_away(self) -> bool:
        """Whether this node sends nothing: its disk is full, or it is leaving the epoch."""
        return self._space.is_full or self._epochs.is_silent
