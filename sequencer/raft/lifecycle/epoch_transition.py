"""How this node moves from one epoch of the cluster to the next. For the loop's thread.

There are three ways: a committed reset, after which the node starts the next epoch with its state; an
operator who forces the node; or a state fetched from peers that are in a later epoch.

Invariants:
- From the reset on, this node applies nothing in its epoch and takes no snapshot of it. It ends with
  `EpochOver` when the state that the next epoch starts with is durable.
- While the state of a later epoch is being made durable, or after a force, the node neither sends nor
  receives. Otherwise it could break a promise that it makes in the old epoch.
- A forced epoch is refused while a majority could elect a leader, and until a majority can continue with the
  new epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from rt.cluster_epoch import (
    GENERATIONS_MAX,
    generation_of,
    is_later,
    is_rival,
    is_succeeded,
    may_be_reset,
    name_of,
)
from rt.errors import ClusterMismatch, DiskFull
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller
from sequencer.raft.lifecycle.peers import Peers
from sequencer.raft.lifecycle.services import NodeServices
from sequencer.raft.lifecycle.state_transfer import StateFetcher, StateServer
from sequencer.raft.model.cluster_state import ClusterState, encode_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import ResetEntry, encode_reset
from sequencer.raft.model.epochs import (
    LEAVE_DELAY_S,
    EpochLeft,
    EpochOver,
    NoMajority,
    forced_epoch,
    next_epoch,
)
from sequencer.raft.model.members import is_majority, voters_of
from sequencer.raft.model.messages import FetchState, FetchStateChunk, Hello
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotStore
from sequencer.raft.storage.worker import BackgroundWorker

logger = logging.getLogger("sequencer.raft")


class EpochTransition:
    """Decides when to leave the epoch, which epoch follows, and which node's state the node continues
    with.
    """

    def __init__(
        self,
        services: NodeServices,
        peers: Peers,
        epoch_left: EpochLeft,
        epoch_exit: EpochExit,
        state_server: StateServer,
        state_fetcher: StateFetcher,
        installer: SnapshotInstaller,
    ) -> None:
        self._config, self._own, self._machine = services.config, services.own, services.machine
        self._raft, self._snapshots, self._new_id = services.raft, services.snapshots, services.new_id
        self._send = services.network.send
        self._peers, self._epoch_left, self._epoch_exit = peers, epoch_left, epoch_exit
        self._state_server, self._state_fetcher, self._installer = state_server, state_fetcher, installer

    @property
    def is_silent(self) -> bool:
        """Whether the node neither sends nor receives: a later epoch's state is being made durable."""
        return self._epoch_exit.is_silent or (
            self._state_fetcher.is_installing and not self._own.identity.is_blank
        )

    # With this node's own state

    def reset(self, command: bytes) -> bytes | None:
        """The entry to propose so that `command` ends this epoch. None if no epoch can follow."""
        epoch = self._own.identity.epoch
        if may_be_reset(epoch):
            return encode_reset(ResetEntry(epoch, command))
        logger.error("reset_rejected epoch=%s error='the last one of its line'", name_of(epoch))
        return None

    def force(self, command: bytes) -> NoMajority | None:
        epoch_exit, config, own = self._epoch_exit, self._config, self._own.identity
        if epoch_exit.is_over:
            hint = "Try again when it is done."
            ending = NoMajority("a reset is ending this epoch", where=config.directory, hint=hint)
            return None if epoch_exit.forced == command else ending
        new = self._peers.new_disks()
        voters = [*([config.name] if self._raft.is_counted_here else []), *self._peers.voters()]
        members = voters_of(self._raft.voter_disks.members)
        why_not = refusal(config, own.epoch, members, new, voters, is_blank=own.is_blank)
        if why_not is not None:
            return why_not
        self._raft.fall_silent()
        self._raft.apply_all()  # This may also apply a reset that is possibly not committed.
        last = self._own.state
        last.index += 1
        self._machine.apply(last.index, command)
        disks = new | {config.name: own.disk}
        state = forced_epoch(last, self._machine.digest(), disks, self._new_id())
        logger.critical("epoch_forced epoch=%s disks=%s", name_of(state.epoch), ",".join(sorted(disks)))
        epoch_exit.force(command, state, self._machine.snapshot(), now())
        return None

    def leave(self) -> None:
        """Start the next epoch, as soon as no peer still needs to learn that this one ended."""
        began = now()
        is_awaited = self._raft.leads and self._peers.is_any_of_this_epoch()
        if not self._epoch_exit.should_leave(began, is_awaited=is_awaited):
            return
        if self._epoch_exit.has_next_state:
            self._epoch_exit.retry_write(began)
        else:
            last = self._own.state
            state = next_epoch(last, self._machine.digest())
            logger.warning("epoch_left epoch=%s chain=%08x", name_of(last.epoch), state.chain)
            self._epoch_exit.write(state, self._machine.snapshot(), began)

    # With a peer's state

    def seek_state(self) -> None:
        """Fetch the state of a later epoch if this epoch cannot continue. A blank disk fetches any state."""
        peers: list[str] = []
        if self._installer.is_installing:
            return
        raft, epoch_left = self._raft, self._epoch_left
        if self._own.identity.is_blank:
            is_over = raft.follower_role.leaderless_s > epoch_left.patience_s
            peers = self._peers.members() if is_over else []
        elif epoch_left.elsewhere:
            self._check_is_followed()
            own, is_bound = self._own.identity.epoch, raft.is_counted_here
            peers = epoch_left.peers_to_ask(own, raft.follower_role.leaderless_s, is_bound=is_bound)
        if peers:
            self._installer.give_up()
            self._state_fetcher.ask(peers, now())

    def on_state_chunk(self, peer: str, hello: Hello, chunk: FetchStateChunk) -> None:
        if self._may_follow(hello.epoch):
            self._state_fetcher.on_state_chunk(peer, hello, chunk, now())

    def serve_state(self, peer: str, hello: Hello, asks: FetchState) -> None:
        """Answer a peer of an earlier epoch, or a blank one whose disk the cluster counts."""
        newest = self._snapshots.newest
        if newest is None or newest.epoch != self._own.identity.epoch:
            return
        if self._peers.may_fetch_state(hello, newest, peer):
            chunk = self._state_server.chunk_for(peer, asks, now())
            if chunk is not None:
                self._send(peer, chunk)

    def _may_follow(self, epoch: int) -> bool:
        """Whether to adopt a state of that epoch. Checked for each chunk, because the disk may have started
        to count.
        """
        own = self._own.identity.epoch
        if self._own.is_blank or is_succeeded(own, epoch):
            return True
        return is_later(own, epoch) and not self._raft.is_counted_here

    def _check_is_followed(self) -> None:
        """Raise `rt.ClusterMismatch` if the cluster continues in an epoch that was forced without this node.

        A disk that does not count in its own epoch has promised nothing in it, so it follows to a later
        epoch.
        """
        own = self._own.identity.epoch
        without = self._epoch_left.forced_without(own)
        if without and (self._raft.is_counted_here or is_rival(own, next(iter(without.values())))):
            epochs = sorted({name_of(epoch) for epoch in without.values()})
            raise ClusterMismatch(
                "an operator forced a new epoch from another node's state, without this node",
                where=self._config.directory,
                got=f"epoch {name_of(own)}",
                expected=f"epoch {', '.join(epochs)}, as {', '.join(sorted(without))} say",
                hint="Empty the node's Raft and data directories, then start it: it rejoins.",
            )


class EpochExit:
    """Writes the state that the next epoch starts with. A failed write is repeated every `retry_s`."""

    def __init__(self, snapshots: SnapshotStore, worker: BackgroundWorker, retry_s: float) -> None:
        self._snapshots, self._worker, self._retry_s = snapshots, worker, retry_s
        self._stays_until: float | None = None
        self._retry_at = 0.0
        self._is_writing = False
        self.forced: bytes | None = None
        """The command with which an operator forced this node."""
        self._begins: tuple[ClusterState, Callable[[], bytes]] | None = None
        """The state that the next epoch starts with, and the encoder of the state machine's part."""

    @property
    def is_over(self) -> bool:
        return self._stays_until is not None

    @property
    def due(self) -> float:
        """Earliest time at which `should_leave` may become true without another event."""
        if self._stays_until is None or self._is_writing:
            return float("inf")
        return max(self._stays_until, self._retry_at)

    def start(self, now: float) -> None:
        self._stays_until = now + LEAVE_DELAY_S

    def should_leave(self, now: float, *, is_awaited: bool) -> bool:
        """Whether to `write` now. `is_awaited`: this node leads others that have not left yet."""
        if self._stays_until is None or self._is_writing or now < self._retry_at:
            return False
        return now >= self._stays_until or not is_awaited

    def force(self, command: bytes, state: ClusterState, encode: Callable[[], bytes], now: float) -> None:
        """Stop sending and receiving, then call `write`."""
        self.forced = command
        self.write(state, encode, now)

    @property
    def is_silent(self) -> bool:
        return self.forced is not None

    @property
    def has_next_state(self) -> bool:
        return self._begins is not None

    def write(self, state: ClusterState, encode: Callable[[], bytes], now: float) -> None:
        """Write, on the worker, the state that the next epoch starts with. May be called once."""
        assert self._begins is None, "two epochs that follow this one"
        self._begins = state, encode
        self._stays_until = now if self._stays_until is None else self._stays_until
        self.retry_write(now)

    def retry_write(self, now: float) -> None:
        assert self._begins is not None
        state, encode = self._begins
        self._is_writing = True

        def write() -> SnapshotMeta:
            newest = self._snapshots.newest
            if newest is not None and not is_later(newest.epoch, state.epoch):
                return newest  # A peer sent it in the meantime.
            content = b"".join([encode_state(state), encode()])
            return self._snapshots.write(state.cluster, state.epoch, state.applied, content)

        self._worker.run(write, self._on_written, lambda error: self._on_failed(error, now))

    def _on_written(self, meta: SnapshotMeta) -> None:
        raise EpochOver(meta.epoch)

    def _on_failed(self, error: BaseException, now: float) -> None:
        if not isinstance(error, DiskFull):
            raise error
        logger.error("epoch_start_failed error=%r", str(error))
        self._is_writing, self._retry_at = False, now + self._retry_s


def refusal(
    config: RaftConfig,
    epoch: int,
    members: Collection[str],
    new: Collection[str],
    voters: Collection[str],
    *,
    is_blank: bool,
) -> NoMajority | None:
    """Why this node may not force an epoch, or None.

    `members`: the voters of the list in force. `new`: connected members on wiped disks that do not count yet.
    `voters`: connected members that count in `epoch`. Only voters count.
    """
    if config.name not in members:
        return NoMajority(
            "an epoch cannot be forced on a node that does not vote",
            where=config.name,
            expected=f"one of {', '.join(sorted(members))}",
            hint="Force a voter.",
        )
    if is_blank or not is_majority(1 + len(set(new) & set(members)), len(members)):
        missing = sorted(set(members) - {config.name} - set(new))
        return NoMajority(
            "an epoch cannot be forced before a majority of the members can continue with it",
            got=f"this node, and with empty directories {', '.join(sorted(new)) or 'none'}",
            expected=f"{len(members) // 2} of the others, started with empty directories",
            hint=f"Start some of {', '.join(missing)} with empty Raft and data directories, then try again.",
        )
    if is_majority(len(set(voters) & set(members)), len(members)):
        return NoMajority(
            "an epoch cannot be forced while a majority could elect a leader",
            where=config.directory,
            got=", ".join(sorted(voters)),
            hint="Wait for a leader. If none is elected, the logs of the nodes say why.",
        )
    if generation_of(epoch) == GENERATIONS_MAX:
        return NoMajority(
            "the cluster was forced too often", where=config.directory, expected=f"{GENERATIONS_MAX} times"
        )
    return None
