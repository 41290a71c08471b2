"""`Raft`: consensus as the sequencer uses it, on real disk, network and thread."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from rt.cluster_epoch import name_of
from rt.errors import Closed, DiskFull
from rt.log.disk import REAL, Disk
from rt.net.tls import TLS
from sequencer.raft.core.member_changes import complete
from sequencer.raft.lifecycle.services import NodeEnvironment
from sequencer.raft.model.api import Leadership, StateMachine, Status
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.epochs import EpochOver, NoMajority
from sequencer.raft.model.members import MemberChange, MemberRemoved, Members
from sequencer.raft.model.messages import ID_BYTES
from sequencer.raft.node import RaftNode
from sequencer.raft.storage.worker import Worker
from sequencer.raft.transport.mesh import TlsMesh

EXIT_FAILED = 70
"""Exit status after consensus failed: EX_SOFTWARE of sysexits.h."""
DISK_FULL_PAUSE_S = 0.1

logger = logging.getLogger("sequencer.raft")


def end_process(_error: BaseException) -> None:
    """Stop at once: nothing may follow a failed fsync or a diverged replica."""
    logging.shutdown()
    os._exit(EXIT_FAILED)


class Raft:
    """A replicated log of commands: a member of the cluster, on a thread of its own.

    The constructor locks the directory and listens. Then the node joins, follows or leads. `listen`: by
    default the port of its own address on all interfaces. Every method may be called from any thread, unless
    its docstring names the consensus thread.

    All callbacks run on the consensus thread. `on_leadership` is called after each change, between two calls
    of the machine. `on_members` is called with the committed list of members, at the start and after each
    change of the list. `on_failure` is called after consensus stopped with an error and every future failed.
    It gets `MemberRemoved` if this node is no longer a member. `on_epoch_over` is called instead of
    `on_failure` when everything is closed and the node must be opened again. By default, both `on_failure`
    and `on_epoch_over` end the process with status 70.

    Raises `rt.StorageError`, `rt.Corrupt`, `rt.ClusterMismatch`, `rt.CertificateError`, or `OSError` if the
    port is taken.
    """

    def __init__(
        self,
        config: RaftConfig,
        machine: StateMachine,
        *,
        tls: TLS,
        listen: tuple[str, int] | None = None,
        disk: Disk = REAL,
        on_leadership: Callable[[Leadership], None] = lambda _: None,
        on_app_message: Callable[[str, bytes], None] = lambda _peer, _content: None,
        on_members: Callable[[Members], None] = lambda _: None,
        on_failure: Callable[[BaseException], None] = end_process,
        on_epoch_over: Callable[[EpochOver], None] = end_process,
    ) -> None:
        _, _, port = config.members[config.name].rpartition(":")
        self._mesh = TlsMesh(
            name=config.name, listen=listen or ("", int(port)), members=config.members, tls=tls
        )
        self._on_failure, self._on_epoch_over = on_failure, on_epoch_over
        self._changes: set[Future[None]] = set()
        self._changing = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_stopping = threading.Event()
        try:
            self._node = RaftNode(
                config,
                machine,
                NodeEnvironment(
                    network=self._mesh,
                    worker=Worker(f"raft-{config.name}-worker", self._mesh.wake),
                    rng=random.Random(),
                    new_id=lambda: os.urandom(ID_BYTES),
                    disk=disk,
                    fill_segments=True,
                ),
                on_disk_full=self._wait_for_space,
                on_leadership=on_leadership,
                on_app_message=on_app_message,
                on_members=on_members,
                calls=self._calls,
            )
        except BaseException:
            self._mesh.close()
            raise
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"raft-{config.name}", daemon=True)
        self._thread.start()

    def propose(self, command: bytes) -> Future[int]:
        """Commit a command; the future returns its index after this node has applied it.

        The command is forwarded to the leader, retried after a leader failure, and applied exactly once.
        Proposals of one thread are applied in order. A command may still be committed after the caller
        stopped waiting for its future.

        Raises `rt.Overloaded` if too much is in flight, `rt.MessageTooLarge` if the command is above 1 MiB,
        and `rt.Closed`. A future fails with `rt.Closed` when the node stops. The outcome of its command is
        then unknown.
        """
        return self._node.propose(command)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the consensus thread, between two calls of the machine, in order.

        Pending calls are dropped when the node stops. An exception in `call` stops the node.
        """
        self._calls.append(call)
        self._node.wake()

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None] = lambda _: None) -> None:
        """Poll a descriptor of another owner on the consensus thread. See `DescriptorWatch`."""
        self._mesh.others.watch(fd, events, on_ready)

    def send(self, peer: str, content: bytes) -> bool:
        """Send a message to another member. It may be lost; delivered messages keep their order.

        On the consensus thread only. Returns False if the peer is not connected. The peer's `on_app_message`
        receives it.
        """
        return self._node.send(peer, content)

    def reset(self, command: bytes) -> None:
        """End this epoch of the cluster with `command`, the last command that any node applies in it.

        On the consensus thread only. The request may be lost: repeat it until the command is applied or the
        epoch changes. Every node that applied the command ends with `on_epoch_over`, and its open futures
        fail. When the node is opened again, it continues in the next epoch, with its state at that time.
        """
        self._node.reset(command)

    def force(self, command: bytes) -> NoMajority | None:
        """Start an epoch without a majority, with this node's state and `command`. Return None if the epoch
        has started.

        On the consensus thread only, and only if an operator says that the other nodes are lost. Entries of
        this node's log are applied even if they are possibly not committed. Commands that this node never
        received are lost. From then on only these disks count: the disk of this node, and the disks of the
        members that are connected and blank. Together they must be a majority. Otherwise the reason is
        returned, and nothing changes. All other nodes must be wiped. The node ends as it does after `reset`.
        """
        return self._node.force(command)

    def change_members(self, change: MemberChange) -> Future[None]:
        """Add a learner, promote it, or remove a member. The future completes when this node has applied it.

        Only on the leader. It fails with `MemberChangeRefused`, or with `rt.Closed` when the node stops. It
        fails with `MemberChangeNotReady`, which is retriable, in these cases: this node does not lead, or
        ceases to (the change may still be committed); another change is in flight; no entry of the leader's
        term is committed; too few voters of the new list are connected, with a disk that counts; a learner to
        be promoted is far behind; a leader is asked to remove itself.
        """
        done: Future[None] = Future()
        with self._changing:
            if self._has_ended:
                raise Closed("consensus has stopped", hint="Restart the node.")
            self._changes.add(done)
        done.add_done_callback(self._changes.discard)
        self.call_soon(lambda: self._node.change_members(change, done))
        return done

    @property
    def members(self) -> Members:
        """The newest list of members that this node has, committed or not: it is in force."""
        return self._node.membership.members

    def transfer_leadership(self, timeout_s: float) -> bool:
        """If this node leads, transfer leadership to the most up-to-date member.

        Returns whether another member leads: at once if this node does not lead, else when another leader is
        known, after `timeout_s` at most. Commands proposed meanwhile wait. If the transfer fails, this node
        remains leader. Must not be called on the consensus thread.
        """
        assert threading.get_ident() != self._thread.ident, "it would wait for its own thread"
        done: Future[bool] = Future()
        self.call_soon(lambda: self._node.transfers.start(timeout_s, done))
        try:
            return done.result(timeout_s)
        except TimeoutError:
            return self.leader not in {None, self._node.name}

    @property
    def is_caught_up(self) -> bool:
        """Whether this node has applied all that was committed before it started, or in earlier terms."""
        return self._node.is_caught_up

    @property
    def is_leader(self) -> bool:
        """Whether this node believes that it leads, and has applied all entries of earlier terms."""
        return not self._has_ended and self._node.is_leader

    @property
    def leader(self) -> str | None:
        """The leader as this node knows it."""
        return None if self._has_ended else self._node.leader

    def status(self) -> Status:
        return self._node.status(is_stopped=self._has_ended)

    def stop(self) -> None:
        """Close all connections and threads, except a thread that waits for name resolution. Idempotent.

        Commands in flight fail with `rt.Closed`. If the machine or a future's callback calls this on the
        consensus thread, it does not wait.
        """
        self._is_stopping.set()
        self._mesh.wake()
        if threading.get_ident() != self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        over: EpochOver | None = None
        try:
            while not self._is_stopping.is_set():
                self._node.step()
        except EpochOver as error:
            over = error
        except BaseException as error:  # noqa: BLE001  # Nothing may continue after any error.
            if not (isinstance(error, DiskFull) and self._is_stopping.is_set()):
                failure = error
        with self._changing:
            self._has_ended = True
            changes = list(self._changes)
        # First stop sending, then fail the futures, then wait for the worker.
        self._mesh.close()
        closed = failure or Closed("consensus was stopped")
        self._node.proposals.close(closed)
        for done in changes:
            complete(done, Closed("consensus stopped; the change may or may not be committed", got=closed))
        try:
            if failure is not None:
                self._node.fail(failure)
                is_removed = isinstance(failure, MemberRemoved)
                logger.critical("stopped error=%r", str(failure), exc_info=None if is_removed else failure)
                self._on_failure(failure)
        finally:
            self._node.close()
        if over is not None:
            logger.warning("epoch_over next=%s", name_of(over.epoch))
            self._on_epoch_over(over)

    def _wait_for_space(self, error: DiskFull) -> None:
        if self._is_stopping.wait(DISK_FULL_PAUSE_S):
            raise error
