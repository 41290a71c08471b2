"""The status of a publisher, as values: its current problem, its progress, and its counters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from itertools import islice
from time import time_ns
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from rt.errors import Closed, DiskFull, RtError, StorageFailed
from rt.log.format.segment import SegmentId
from rt.sidecar.progress_file import NO_LEVEL, Level, PublisherProgress
from rt.sidecar.protocol import EndpointStatus

if TYPE_CHECKING:
    from rt.client.batch_writer import BatchWriter
    from rt.client.replication_problem import ReplicationProblem
    from rt.client.session_log import SessionLog
    from rt.client.wait_handle import WaitHandle

ReplicationState: TypeAlias = Literal["local", "connecting", "replicating", "waiting", "blocked", "closed"]


class PublisherStatus(Struct, frozen=True):
    """How the replication of a publisher stands: the result of `Publisher.status`.

    `state` is one of these:

    - "local": the publisher has no endpoints.
    - "connecting": no attempt to connect has ended yet.
    - "replicating": a majority of the nodes is connected.
    - "waiting": fewer are connected, which may pass by itself. `endpoints` says why.
    - "blocked": nothing is replicated until somebody fixes the cause of `error`.
    - "closed": the publisher was closed.

    It began at `since_ns` (ns since the Unix epoch). `endpoints` has an `EndpointStatus` for each node: those
    that the publisher was opened with, and once the members of the cluster have changed, its members.
    `unsent_messages` were published and are not replicated yet, also those of earlier runs in the directory.
    `unsent_bytes` are their bytes, estimated within a segment of which a part is replicated. `progress` is
    that of `Publisher.progress`.
    """

    state: ReplicationState
    since_ns: int
    error: RtError | None
    endpoints: tuple[EndpointStatus, ...]
    unsent_messages: int
    unsent_bytes: int
    progress: PublisherProgress


class PublisherStats(Struct, frozen=True):
    """What a publisher has counted since it was opened: the result of `Publisher.stats`.

    The first three never go back. `messages` were accepted, with `bytes` bytes of values. `batches` were
    written to the log; the batch that is being collected is not counted.

    `written`, `synced`, `replicated` and `merged` count those of these messages that are in the log, on the
    disk of this machine, on the disks of a majority of the nodes, and merged. Without endpoints the last two
    stay 0.

    `waiting_messages` are not merged yet, also those of earlier runs in the directory. `waiting_bytes` are
    their bytes on the disk and in memory, estimated within a segment of which a part is merged.

    `disconnects` counts lost connections to nodes, and `problems` how often something began that blocks
    replication. `last_error` is the latest of these problems, also if it was fixed, or the error of the
    local disk that stops writing now; None if there was none.
    """

    messages: int
    bytes: int
    batches: int
    written: int
    synced: int
    replicated: int
    merged: int
    waiting_messages: int
    waiting_bytes: int
    disconnects: int
    problems: int
    last_error: RtError | None


class SegmentExtent(NamedTuple):
    """Numbers `first` to `end` (exclusive) in `size_bytes` bytes of a segment."""

    id: SegmentId
    first: int
    end: int
    size_bytes: int


class PublisherMonitor:
    """Reads the state of the parts of a publisher. `lock` guards the log and the writer. Thread-safe."""

    def __init__(
        self,
        log: SessionLog,
        writer: BatchWriter,
        problem: ReplicationProblem,
        lock: threading.Lock,
    ) -> None:
        self.lock = lock
        self.since_ns = time_ns()
        """When the publisher was opened, or closed."""
        self._log, self._writer = log, writer
        self.replication: WaitHandle | None = None
        """Set if there are endpoints."""
        self._problem = problem

    def progress(self) -> PublisherProgress:
        """The next number of this run to be written, replicated and merged."""
        with self.lock:
            first, written, run = self._log.run_first, self._writer.batch.first, self._log.run
        return PublisherProgress(written, *self._reached(run, first))

    def status(self) -> PublisherStatus:
        progress = self.progress()
        replication, error = self.replication, self._problem.error
        with self.lock:
            state: ReplicationState = "local" if replication is None else replication.state
            if isinstance(self._writer.pending_error, Closed):
                state = "closed"
            replicated = max(replication.replicated, replication.merged) if replication else NO_LEVEL
            messages, size_bytes = above(self._log.extents(), replicated)
            batch = self._writer.batch
            return PublisherStatus(
                state,
                replication.since_ns if replication and state != "closed" else self.since_ns,
                error,
                replication.endpoints if replication else (),
                messages + len(batch.values),
                size_bytes + batch.bytes,
                progress,
            )

    def stats(self) -> PublisherStats:
        with self.lock:
            log, batch = self._log, self._writer.batch
            first, pending = log.run_first, len(batch.values)
            replicated, merged = self._reached(log.run, first)
            level = self.replication.merged if self.replication else NO_LEVEL
            messages, size_bytes = above(log.extents(), level)
            batches, written_bytes, synced = log.batches, log.value_bytes, log.synced
            failed = self._writer.pending_error
        problems, last_error = self._problem.count, self._problem.last
        if isinstance(failed, DiskFull | StorageFailed):
            last_error = failed
        return PublisherStats(
            batch.first + pending - first,
            written_bytes + sum(map(len, islice(batch.values, pending))),
            batches,
            batch.first - first,
            max(synced - first, 0),
            replicated - first,
            merged - first,
            messages + pending,
            size_bytes + batch.bytes if pending else size_bytes,
            self.replication.disconnects if self.replication else 0,
            problems,
            last_error,
        )

    def _reached(self, run: int, first: int) -> tuple[int, int]:
        """The next numbers to be replicated and to be merged, of `run`, which started at `first`."""
        if self.replication is None:
            return first, first
        with contextlib.suppress(OSError):
            self.replication.poll()  # The pool reads the progress less often than it is written.
        replicated, merged = self.replication.replicated, self.replication.merged
        return (
            max(replicated.number, first) if replicated.run == run else first,
            max(merged.number, first) if merged.run == run else first,
        )


def above(segments: Iterable[SegmentExtent], level: Level) -> tuple[int, int]:
    """Messages and bytes of the segments above `level`.

    An earlier run is replicated and merged completely before a later one begins.
    """
    messages = size_bytes = 0
    for segment in segments:
        count = segment.end - segment.first
        if level.run > segment.id.run or not count:
            continue
        left = count
        if level.run == segment.id.run:
            left = segment.end - min(max(level.number, segment.first), segment.end)
        messages += left
        size_bytes += segment.size_bytes * left // count
    return messages, size_bytes


def state_of(
    error: RtError | None, endpoints: tuple[EndpointStatus, ...], members: int = 0
) -> ReplicationState:
    """The state of an open publisher with endpoints. `members` is the number of nodes; if it is 0, the
    endpoints are counted.
    """
    if error is not None:
        return "blocked"
    if 2 * sum(one.is_connected for one in endpoints) > (members or len(endpoints)):
        return "replicating"
    return "waiting" if any(one.error is not None for one in endpoints) else "connecting"


def reasons(endpoints: Iterable[EndpointStatus]) -> str:
    """Why each endpoint that is not connected failed; empty if none did."""
    return "; ".join(filter(None, (one.reason for one in endpoints)))
