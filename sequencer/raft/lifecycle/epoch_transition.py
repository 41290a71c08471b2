"""How this node gets from one epoch of the cluster into the next.

For the loop's thread. There are three ways: a reset is applied, and the node begins the next epoch with what
it has; an operator forces it to; or the others went on without it, and it takes their state. The law: nothing
is said or heard in an epoch while the state of a later one is being made durable here: once that is, whatever
this disk promised in the present epoch meanwhile would be broken.

The end of an epoch on a node that has applied its reset: it stays a while, and goes on in the next epoch.

For the loop's thread. The law: from the reset on this node applies nothing in its epoch, and takes no
snapshot of it; it ends with `EpochOver`, once the state that the next epoch begins with is durable. One that
was forced to go on by itself falls silent: it says and hears nothing more in the old epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rt.cluster_epoch import is_later, is_rival, is_succeeded, may_be_reset, name_of
from rt.errors import ClusterMismatch, DiskFull
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.force_quorum import is_ending, refusal
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller
from sequencer.raft.lifecycle.peers import Peers
from sequencer.raft.lifecycle.state_fetch import StateFetcher
from sequencer.raft.lifecycle.state_server import StateServer
from sequencer.raft.model.api import StateMachine
from sequencer.raft.model.cluster_state import ClusterState, encode_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import ResetEntry, encode_reset
from sequencer.raft.model.epochs import STAY_S, EpochLeft, EpochOver, NoMajority, forced_epoch, next_epoch
from sequencer.raft.model.messages import FetchState, FetchStateChunk, Hello, Message
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotStore
from sequencer.raft.storage.worker import BackgroundWorker

logger = logging.getLogger("sequencer.raft")


class EpochTransition:
    """Decides when to leave, for which epoch, and with whose state. `send` queues a message."""

    def __init__(
        self,
        config: RaftConfig,
        own: LocalMembership,
        machine: StateMachine,
        raft: SyncObj,
        peers: Peers,
        behind: EpochLeft,
        snapshots: SnapshotStore,
        *,
        leaving: EpochExit,
        giving: StateServer,
        fetching: StateFetcher,
        installing: SnapshotInstaller,
        new_id: Callable[[], bytes],
        send: Callable[[str, Message], object],
    ) -> None:
        self._config, self._own, self._machine, self._raft = config, own, machine, raft
        self._peers, self._behind, self._snapshots = peers, behind, snapshots
        self._leaving, self._giving, self._fetching = leaving, giving, fetching
        self._installing, self._new_id, self._send = installing, new_id, send

    @property
    def is_silent(self) -> bool:
        """Whether nothing is said or heard: a later epoch's state is being made durable here."""
        return self._leaving.is_silent or (self._fetching.is_installing and not self._own.identity.is_blank)

    # With what this node has

    def reset(self, command: bytes) -> bytes | None:
        """What to propose so that `command` ends this epoch; None if there can be no next one."""
        epoch = self._own.identity.epoch
        if may_be_reset(epoch):
            return encode_reset(ResetEntry(epoch, command))
        logger.error("reset_rejected epoch=%s error='the last one of its line'", name_of(epoch))
        return None

    def force(self, command: bytes) -> NoMajority | None:
        """See `Consensus.force`."""
        leaving, config, own = self._leaving, self._config, self._own.identity
        if leaving.is_over:
            return None if leaving.forced == command else is_ending(config.directory)
        new = self._peers.new_disks()
        voters = [*([config.name] if self._raft.is_counted_here else []), *self._peers.voters()]
        why_not = refusal(config, own.epoch, new, voters, is_blank=own.is_blank)
        if why_not is not None:
            return why_not
        self._raft.fall_silent()
        self._raft.apply_all()  # It may hold a reset of which nobody knows whether it was committed, too.
        last = self._own.state
        last.index += 1
        self._machine.apply(last.index, command)
        disks = new | {config.name: own.disk}
        state = forced_epoch(last, self._machine.digest(), disks, self._new_id())
        logger.critical("epoch_forced epoch=%s disks=%s", name_of(state.epoch), ",".join(sorted(disks)))
        leaving.force(command, state, self._machine.snapshot(), now())
        return None

    def leave(self) -> None:
        """Go on in the next epoch, once nobody in this one waits for word of its end."""
        began = now()
        is_awaited = self._raft.leads and self._peers.is_any_of_this_epoch()
        if not self._leaving.is_to_leave(began, is_awaited=is_awaited):
            return
        if self._leaving.is_begun:
            self._leaving.write_again(began)
        else:
            last = self._own.state
            state = next_epoch(last, self._machine.digest())
            logger.warning("epoch_left epoch=%s chain=%08x", name_of(last.epoch), state.chain)
            self._leaving.write(state, self._machine.snapshot(), began)

    # With what others have

    def seek_state(self) -> None:
        """Ask for the state of a later epoch, if this one is not to be waited for; a blank disk for any."""
        peers: list[str] = []
        if self._installing.is_installing:
            return
        raft, behind = self._raft, self._behind
        if self._own.identity.is_blank:
            is_over = raft.leaderless_s > behind.patience_s
            peers = self._peers.members() if is_over else []
        elif behind.elsewhere:
            self._check_is_followed()
            own, is_bound = self._own.identity.epoch, raft.is_counted_here
            peers = behind.whom_to_ask(own, raft.leaderless_s, is_bound=is_bound)
        if peers:
            self._installing.give_up()
            self._fetching.ask(peers, now())

    def on_piece(self, peer: str, hello: Hello, piece: FetchStateChunk) -> None:
        """A piece of a state came."""
        if self._may_follow(hello.epoch):
            self._fetching.on_piece(peer, hello, piece, now())

    def give_state(self, peer: str, hello: Hello, asks: FetchState) -> None:
        """Answer a peer of an earlier epoch, or a blank one whose disk the cluster counts on."""
        newest = self._snapshots.newest
        if newest is None or newest.epoch != self._own.identity.epoch:
            return
        if self._peers.may_take_state(hello, newest, peer):
            piece = self._giving.piece_for(peer, asks, now())
            if piece is not None:
                self._send(peer, piece)

    def _may_follow(self, epoch: int) -> bool:
        """Whether to go on in that epoch. It is asked with each piece: the disk may have come to count."""
        own = self._own.identity.epoch
        if self._own.is_blank or is_succeeded(own, epoch):
            return True
        return is_later(own, epoch) and not self._raft.is_counted_here

    def _check_is_followed(self) -> None:
        """`rt.ClusterMismatch` if the cluster goes on in an epoch that was forced without this node.

        A disk that does not count in its own epoch has promised nothing there, and follows into a later one.
        """
        own = self._own.identity.epoch
        without = self._behind.forced_without(own)
        if without and (self._raft.is_counted_here or is_rival(own, next(iter(without.values())))):
            epochs = sorted({name_of(epoch) for epoch in without.values()})
            raise ClusterMismatch(
                "an operator had the cluster go on from another node's state, without this one",
                where=self._config.directory,
                got=f"epoch {name_of(own)}",
                expected=f"epoch {', '.join(epochs)}, as {', '.join(sorted(without))} say",
                hint="Empty the node's Raft and data directories, and start it: it joins again.",
            )


class EpochExit:
    """Leaves one epoch for the next. What cannot be written now is tried again every `retry_s`."""

    def __init__(self, snapshots: SnapshotStore, aside: BackgroundWorker, retry_s: float) -> None:
        self._snapshots, self._aside, self._retry_s = snapshots, aside, retry_s
        self._stays_until: float | None = None
        self._retry_at = 0.0
        self._is_writing = False
        self.forced: bytes | None = None
        """The command with which an operator had this node go on by itself."""
        self._begins: tuple[ClusterState, Callable[[], bytes]] | None = None
        """What the next epoch begins with, and what encodes the state machine's part."""

    @property
    def is_over(self) -> bool:
        """Whether the epoch has ended here."""
        return self._stays_until is not None

    @property
    def due(self) -> float:
        """When `is_to_leave` may become true by time alone."""
        if self._stays_until is None or self._is_writing:
            return float("inf")
        return max(self._stays_until, self._retry_at)

    def begin(self, now: float) -> None:
        """The reset was applied."""
        self._stays_until = now + STAY_S

    def is_to_leave(self, now: float, *, is_awaited: bool) -> bool:
        """Whether to `write` now. `is_awaited`: this node leads others that have not left yet."""
        if self._stays_until is None or self._is_writing or now < self._retry_at:
            return False
        return now >= self._stays_until or not is_awaited

    def force(self, command: bytes, state: ClusterState, encode: Callable[[], bytes], now: float) -> None:
        """Fall silent, and `write`."""
        self.forced = command
        self.write(state, encode, now)

    @property
    def is_silent(self) -> bool:
        """Whether the old epoch is nothing to this node any more."""
        return self.forced is not None

    @property
    def is_begun(self) -> bool:
        """Whether it is settled what the next epoch begins with."""
        return self._begins is not None

    def write(self, state: ClusterState, encode: Callable[[], bytes], now: float) -> None:
        """Make durable aside what the next epoch begins with; the loop ends behind that. Once."""
        assert self._begins is None, "two epochs that follow this one"
        self._begins = state, encode
        self._stays_until = now if self._stays_until is None else self._stays_until
        self.write_again(now)

    def write_again(self, now: float) -> None:
        """Try once more to write the very same."""
        assert self._begins is not None
        state, encode = self._begins
        self._is_writing = True

        def write() -> SnapshotMeta:
            newest = self._snapshots.newest
            if newest is not None and not is_later(newest.epoch, state.epoch):
                return newest  # It came from a peer meanwhile.
            content = b"".join([encode_state(state), encode()])
            return self._snapshots.write(state.cluster, state.epoch, state.applied, content)

        self._aside.run(write, self._on_written, lambda error: self._on_failed(error, now))

    def _on_written(self, meta: SnapshotMeta) -> None:
        raise EpochOver(meta.epoch)

    def _on_failed(self, error: BaseException, now: float) -> None:
        if not isinstance(error, DiskFull):
            raise error
        logger.error("epoch_start_failed error=%r", str(error))
        self._is_writing, self._retry_at = False, now + self._retry_s
