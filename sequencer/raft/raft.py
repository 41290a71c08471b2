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
from sequencer.raft.model.api import Leadership, StateMachine, Status
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.epochs import EpochOver, NoMajority
from sequencer.raft.model.messages import ID_BYTES
from sequencer.raft.node import RaftNode
from sequencer.raft.storage.worker import Worker
from sequencer.raft.transport.mesh import TlsMesh

EXIT_FAILED = 70
"""What the process ends with when consensus had to stop: EX_SOFTWARE of sysexits.h."""
DISK_FULL_PAUSE_S = 0.1

logger = logging.getLogger("sequencer.raft")


def end_process(_error: BaseException) -> None:
    """Stop at once: what failed here (an fsync, a replica that differs) must not be followed by anything."""
    logging.shutdown()
    os._exit(EXIT_FAILED)


class Raft:
    """A member of the cluster, running on a thread of its own; implements `Consensus`.

    Opening it takes the directory's lock and listens; it joins, follows or leads by itself from then on.
    `listen` is where to listen, by default the port of its own address on all interfaces. All callbacks come
    on the consensus thread: `on_leadership` whenever that changed, between two calls of the machine;
    `on_failure` when it had to stop, after every future failed; `on_epoch_over`, in its stead, when all is
    closed and it is to be opened again. By default both end the process with status 70.

    Raises `rt.StorageError`, `rt.Corrupt`, `rt.ClusterMismatch`, `rt.CertificateError`, `OSError` for a port
    that is taken.
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
        on_told: Callable[[str, bytes], None] = lambda _peer, _content: None,
        on_failure: Callable[[BaseException], None] = end_process,
        on_epoch_over: Callable[[EpochOver], None] = end_process,
    ) -> None:
        _, _, port = config.members[config.name].rpartition(":")
        self._mesh = TlsMesh(
            name=config.name, listen=listen or ("", int(port)), members=config.members, tls=tls
        )
        self._on_failure, self._on_epoch_over = on_failure, on_epoch_over
        self._calls: deque[Callable[[], None]] = deque()
        self._is_stopping = threading.Event()
        try:
            self._node = RaftNode(
                config,
                machine,
                network=self._mesh,
                aside=Worker(f"raft-{config.name}-aside", self._mesh.wake),
                rng=random.Random(),
                new_id=lambda: os.urandom(ID_BYTES),
                disk=disk,
                on_disk_full=self._wait_for_space,
                on_leadership=on_leadership,
                on_told=on_told,
                calls=self._calls,
                fill_segments=True,
            )
        except BaseException:
            self._mesh.close()
            raise
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"raft-{config.name}", daemon=True)
        self._thread.start()

    def propose(self, command: bytes) -> Future[int]:
        """See `Consensus.propose`."""
        return self._node.propose(command)

    def call_soon(self, call: Callable[[], None]) -> None:
        """See `Consensus.call_soon`."""
        self._calls.append(call)
        self._node.wake()

    def tell(self, peer: str, content: bytes) -> bool:
        """See `Consensus.tell`."""
        return self._node.tell(peer, content)

    def reset(self, command: bytes) -> None:
        """See `Consensus.reset`."""
        self._node.reset(command)

    def force(self, command: bytes) -> NoMajority | None:
        """See `Consensus.force`."""
        return self._node.force(command)

    def hand_over(self, timeout_s: float) -> bool:
        """See `Consensus.hand_over`."""
        assert threading.get_ident() != self._thread.ident, "it would wait for itself"
        done: Future[bool] = Future()
        self.call_soon(lambda: self._node.hand_over(timeout_s, done))
        try:
            return done.result(timeout_s)
        except TimeoutError:
            return self.leader not in {None, self._node.name}

    @property
    def is_caught_up(self) -> bool:
        """Whether all that earlier terms committed is applied here, as far as this node knows."""
        return self._node.is_caught_up

    @property
    def is_leader(self) -> bool:
        """See `Consensus.is_leader`."""
        return not self._has_ended and self._node.is_leader

    @property
    def leader(self) -> str | None:
        """The member that leads, as far as this node knows."""
        return None if self._has_ended else self._node.leader

    def status(self) -> Status:
        """How things stand."""
        return self._node.status(is_stopped=self._has_ended)

    def stop(self) -> None:
        """End it; what is in flight fails with `rt.Closed`.

        Called on the consensus thread, by the machine or a future's callback, it does not wait for the end.
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
        except BaseException as error:  # noqa: BLE001  # whatever it is, nothing may go on
            if not (isinstance(error, DiskFull) and self._is_stopping.is_set()):
                failure = error
        self._has_ended = True
        # First nothing more is said or promised; then whoever waits is told; then the helper is waited for.
        self._mesh.close()
        self._node.proposals.close(failure or Closed("consensus was stopped"))
        try:
            if failure is not None:
                self._node.fail(failure)
                logger.critical("stopped error=%r", str(failure), exc_info=failure)
                self._on_failure(failure)
        finally:
            self._node.close()
        if over is not None:
            logger.warning("epoch_over next=%s", name_of(over.epoch))
            self._on_epoch_over(over)

    def _wait_for_space(self, error: DiskFull) -> None:
        if self._is_stopping.wait(DISK_FULL_PAUSE_S):
            raise error
