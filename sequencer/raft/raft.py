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
from sequencer.raft.lifecycle.services import NodeEnvironment
from sequencer.raft.model.api import Leadership, StateMachine, Status
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.epochs import EpochOver, NoMajority
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
    """A member of the cluster, on a thread of its own. Implements `Consensus`.

    The constructor locks the directory and listens; then the node joins, follows or leads. `listen`: by
    default the port of its own address on all interfaces. All callbacks run on the consensus thread:
    `on_leadership` after each change, between two calls of the machine; `on_failure` after it stopped with an
    error and every future failed; `on_epoch_over` instead, when everything is closed and the node must be
    opened again. By default both end the process with status 70.

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
                calls=self._calls,
            )
        except BaseException:
            self._mesh.close()
            raise
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"raft-{config.name}", daemon=True)
        self._thread.start()

    def propose(self, command: bytes) -> Future[int]:
        return self._node.propose(command)

    def call_soon(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._node.wake()

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None] = lambda _: None) -> None:
        """Poll a descriptor of another owner on the consensus thread. See `DescriptorWatch`."""
        self._mesh.others.watch(fd, events, on_ready)

    def send(self, peer: str, content: bytes) -> bool:
        return self._node.send(peer, content)

    def reset(self, command: bytes) -> None:
        self._node.reset(command)

    def force(self, command: bytes) -> NoMajority | None:
        return self._node.force(command)

    def transfer_leadership(self, timeout_s: float) -> bool:
        assert threading.get_ident() != self._thread.ident, "it would wait for its own thread"
        done: Future[bool] = Future()
        self.call_soon(lambda: self._node.transfer_leadership(timeout_s, done))
        try:
            return done.result(timeout_s)
        except TimeoutError:
            return self.leader not in {None, self._node.name}

    @property
    def is_caught_up(self) -> bool:
        """Whether this node has applied everything that earlier terms committed."""
        return self._node.is_caught_up

    @property
    def is_leader(self) -> bool:
        return not self._has_ended and self._node.is_leader

    @property
    def leader(self) -> str | None:
        return None if self._has_ended else self._node.leader

    def status(self) -> Status:
        return self._node.status(is_stopped=self._has_ended)

    def stop(self) -> None:
        """Stop the node; commands in flight fail with `rt.Closed`.

        Called on the consensus thread, by the machine or a future's callback, it does not wait.
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
        self._has_ended = True
        # First stop sending, then fail the futures, then wait for the worker.
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
