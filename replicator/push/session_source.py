"""The session directory that a push client serves, as its streams share it.

Invariants:
- Bytes that were read and verified for one stream serve the others. Streams look for more bytes in rounds
  (`replicator.push.send_pacer`).
- The reports of the nodes are counted, and written to `.progress`.
- The cluster that accepted the first byte is stored in `.cluster`, and no other cluster gets any bytes. Its
  latest epoch is stored there, too: after a restart the client does not go back to nodes of an earlier epoch.
- Only reports of one line of the cluster's epochs are counted together: nodes that a forced reset separated
  are no majority.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from replicator.protocol.epoch_check import check_epoch, check_line
from replicator.protocol.handshake import NOWHERE, STATUS_SECONDS, PushHello, PushProgress, PushStart
from replicator.protocol.messages import LogOffset
from replicator.push.quorum_progress import QuorumProgress
from replicator.push.send_pacer import SendPacer
from replicator.push.silence_promise import SilencePromise
from replicator.send.read_cache import ReadCache
from rt.cluster_epoch import line_of
from rt.errors import ClusterMismatch, InvalidName, RtError, StorageError
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentId
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import list_segments, read_identity, read_table
from rt.sidecar.cluster_file import CLUSTER_FILE, PushedCluster, read_cluster, write_cluster
from rt.sidecar.progress_file import ProgressFile, PushState

logger = logging.getLogger("replicator")

SETTLE_SECONDS: Final = 0.5
"""How often to repeat a limit of silence until a node answers that it is committed."""


class SessionSource:
    """One incarnation of a session. For one event loop; the caller holds the push client's lock.

    `listen` is called with True if `wake` must be called for each write, otherwise with False.
    """

    def __init__(
        self,
        path: str,
        stream: str,
        *,
        listen: Callable[[bool], None] = lambda _: None,
        disk: Disk = REAL,
    ) -> None:
        self.path = path
        self.disk = disk
        identity = read_identity(disk, path)
        if identity.kind is not LogKind.SESSION:
            raise InvalidName(
                "only a session can be pushed", where=path, got=identity.kind.name, expected="SESSION"
            )
        cluster, self._epoch = read_cluster(path, disk=disk)
        """The latest epoch of a node (`rt.cluster_epoch`); 0: none."""
        self.hello = PushHello(stream, identity.name, identity.origin, identity.dedup_id, cluster)
        self.read_cache = ReadCache()
        self.silence = SilencePromise(disk, path)
        self.quorum = QuorumProgress()
        self.poll_count = 0
        """A stream that found nothing since the last change of this number has everything."""
        self.progressed = asyncio.Event()
        """Set when a node refused the session; after `is_ending` also when there may be nothing left."""
        self.ending = asyncio.Event()
        """Set when the publisher has ended: everything that is to be pushed is there now."""
        self._pacer = SendPacer(
            self._start_round, self._waiting_bytes, asyncio.get_running_loop(), listen=listen
        )
        self._changed: list[asyncio.Event] = []
        self._sent: dict[str, LogOffset] = {}  # Up to where each running stream has sent, by its node.
        self._epochs: dict[str, int] = {}  # The epoch of each connected node when it accepted us.
        self._persisted_run = -1
        self._has_warned = False
        self._progress = ProgressFile(path, identity.origin, cluster, disk=disk)
        self._write_progress(PushState.RUNNING)

    @property
    def is_ending(self) -> bool:
        return self.ending.is_set()

    def changed(self) -> asyncio.Event:
        """An event for one stream that is set at each change of the directory."""
        event = asyncio.Event()
        self._changed.append(event)
        return event

    def stop_listening(self, event: asyncio.Event) -> None:
        """The stream of that event was closed."""
        self._changed = [one for one in self._changed if one is not event]

    def wake(self, *, is_last: bool = False) -> None:
        """Call it when the directory may have changed. `is_last`: it is the last change, so everything is
        there now.
        """
        self.poll_count += is_last
        if is_last:
            self.ending.set()
        self._pacer.request(is_urgent=self.is_ending)

    def persist_run(self, run: int) -> None:
        """Make the start of a run durable: only then may a node learn of it. Storage errors.

        A segment is visible once it has its name. If the name was not synced, it may be lost after a power
        cut. Then the publisher would give the number to another run, and no node would accept that run.
        """
        if run > self._persisted_run:
            with storage_errors(self.path, "syncing a session's directory"):
                self.disk.sync_directory(self.path)
            self._persisted_run = run

    def record_sending(self, end: LogOffset) -> None:
        """A stream now sends everything before `end`."""
        self._pacer.record_sent(end)

    def record_sent(self, node: str, end: LogOffset) -> None:
        """Everything before `end` was passed to gRPC, for one node."""
        self._sent[node] = end
        self.read_cache.prune_before(min(self._sent.values()))

    def record_progress(self) -> None:
        """A node reported, or a stream found nothing more."""
        if self.is_ending:
            self.progressed.set()

    def start(self, start: PushStart) -> None:
        """Record that a node accepted this client.

        `rt.ClusterMismatch` if the node is of another cluster than the others, or a forced reset separated it
        from them; `rt.Unreachable` if it is in an earlier epoch.
        """
        cluster = self.hello.cluster
        if cluster and start.cluster != cluster:
            raise ClusterMismatch(
                "the session belongs to another cluster",
                where=self.path,
                got=start.cluster.hex(),
                expected=cluster.hex(),
                hint="Check `endpoints`. If the earlier cluster no longer exists: stop the publisher, remove "
                f"{os.path.join(self.path, CLUSTER_FILE)}, then start it.",
            )
        is_later = check_epoch(self._epoch, start.epoch, start.node)
        if not cluster or is_later:
            self._save_cluster(start)
        if not cluster:
            self.hello = replace(self.hello, cluster=start.cluster)
            self._progress.set_cluster(start.cluster)
        if is_later:
            if line_of(start.epoch) != line_of(self._epoch):
                for node in self._epochs:
                    self.quorum.remove(node)
                # What was merged in the other line may be missing in this one.
                self.quorum.merged_offset = NOWHERE
            self._epoch = start.epoch
        self._epochs[start.node] = start.epoch
        self.silence.on_start(start)
        self.quorum.start(start.node, start.members, start.offset)
        self._sent[start.node] = start.offset or NOWHERE

    def remove(self, node: str) -> None:
        self._epochs.pop(node, None)
        self.quorum.remove(node)
        self._sent.pop(node, None)
        self._write_progress(self._progress.record.state)

    def report(self, node: str, said: PushProgress) -> None:
        """Record the report of a node for which `start` was called.

        `rt.Unreachable` if a forced reset has separated it from the others since.
        """
        check_line(line_of(self._epoch), self._epochs[node], node)
        self.quorum.report(node, said)
        self._write_progress(PushState.RUNNING)
        self._pacer.record_merged(self.quorum.merged_offset)
        self.record_progress()

    def give_up(self, state: PushState) -> None:
        """Tell the publisher that no node accepts its session."""
        self._write_progress(state)

    def newest_run(self) -> int:
        """The number of the last run; -1 before the first."""
        table, segments = read_table(self.disk, self.path), list_segments(self.disk, self.path)
        known = [*segments, *(sealed.id for sealed in (table.segments if table else ()))]
        return max((segment.run for segment in known), default=-1)

    def bytes_after(self, reached: LogOffset) -> int:
        """Bytes of batches on this disk after `reached`; 0 if the directory was removed."""
        total = 0
        with contextlib.suppress(OSError, RtError):
            for segment in list_segments(self.disk, self.path):
                if segment >= reached.segment:
                    start = reached.offset if segment == reached.segment else 0
                    size = self.disk.size(segment_path(self.path, segment)) or 0
                    total += max(size - max(start, SEGMENT_HEADER_BYTES), 0)
        return total

    async def wait_for_status(self, *, is_urgent: bool) -> None:
        """Wait until the next status is due. If this status must be answered, the wait is short. Otherwise it
        ends early if the publisher ends.
        """
        if is_urgent or self.is_ending:
            await asyncio.sleep(SETTLE_SECONDS if is_urgent else STATUS_SECONDS)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_SECONDS):
                await self.ending.wait()

    def close(self) -> None:
        self._pacer.close()
        self._progress.close()

    def _start_round(self) -> None:
        self.read_cache.start_round()
        for event in self._changed:
            event.set()

    def _waiting_bytes(self, sent: LogOffset) -> int | None:
        """Bytes of the segment after `sent`; None if another segment grows.

        A stream that has announced a run sends none of it until the node has opened it.
        """
        run, roll = sent.segment
        try:
            size = os.stat(segment_path(self.path, sent.segment)).st_size - sent.offset
        except OSError:
            return None
        if size == 0 and (self._exists(SegmentId(run, roll + 1)) or self._exists(SegmentId(run + 1, 0))):
            return None
        return size

    def _exists(self, segment: SegmentId) -> bool:
        return os.path.exists(segment_path(self.path, segment))

    def _write_progress(self, state: PushState) -> None:
        """Write the progress; a storage error is only logged. A full disk is no reason to stop pushing:
        merged data may be deleted.
        """
        said = self.quorum
        try:
            self._progress.write(
                replicated=said.replicated, merged=said.merged, state=state, lacking=said.lacking
            )
        except StorageError as error:
            self._warn(error)

    def _save_cluster(self, start: PushStart) -> None:
        try:
            write_cluster(self.path, PushedCluster(start.cluster, start.epoch), disk=self.disk)
        except StorageError as error:
            self._warn(error)

    def _warn(self, error: StorageError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("progress_not_written path=%s reason=%s", self.path, error)
