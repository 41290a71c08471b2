"""The session directory that a push client serves, as its streams share it.

Laws. What is read and verified for one stream serves the others. Streams look for more in rounds, so that the
busier all are the more each message carries (`replicator.push.send_pacer`). What the nodes say is counted,
and written
to `.progress`; the cluster that took the first byte is remembered in `.cluster`, and no other gets any. What
is counted together was said in one line of the cluster's epochs: nodes that went on apart are no majority.

    `.cluster`:  0  8  magic "RTCLUSTR" | 8  2  version | 10  2  0 | 12  4  checksum | 16  16  cluster id
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from dataclasses import replace

from replicator.protocol.epoch_check import check_epoch, check_line
from replicator.protocol.handshake import NOWHERE, PushHello, PushProgress, PushStart
from replicator.protocol.messages import LogOffset
from replicator.push.quorum_progress import QuorumProgress
from replicator.push.send_pacer import SendPacer
from replicator.send.read_cache import ReadCache
from rt.cluster_epoch import line_of
from rt.errors import ClusterMismatch, InvalidName, StorageError
from rt.log.disk import REAL, Disk, storage_errors, write_whole
from rt.log.format.checksum import around, sealed
from rt.log.format.constants import VERSION
from rt.log.format.segment import LogKind
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_identity
from rt.sidecar.progress_file import ProgressFile, PushState

logger = logging.getLogger("replicator")

CLUSTER_FILE = ".cluster"

_CLUSTER = struct.Struct("<8sHHI16s")
_MAGIC = b"RTCLUSTR"


class SessionSource:
    """One incarnation of a session. For one event loop; the caller holds the push client's lock."""

    def __init__(self, path: str, stream: str, *, disk: Disk = REAL) -> None:
        self.path = path
        self.disk = disk
        identity = read_identity(disk, path)
        if identity.kind is not LogKind.SESSION:
            raise InvalidName(
                "only a session can be pushed", where=path, got=identity.kind.name, expected="SESSION"
            )
        cluster = _read_cluster(disk, path)
        self.hello = PushHello(stream, identity.name, identity.origin, identity.dedup_id, cluster)
        self.shared = ReadCache()
        self.levels = QuorumProgress()
        self.looks = 0
        """Counts what all streams have to look for: one that found nothing since the last has it all."""
        self.progressed = asyncio.Event()
        """Set when a node refused the session; on the last look also when there may be nothing left."""
        self.is_ending = False
        """The publisher has ended: what is there now is all."""
        self._rounds = SendPacer(self._look, self._waiting_bytes, asyncio.get_running_loop())
        self._changed: list[asyncio.Event] = []
        self._sent: dict[str, LogOffset] = {}
        """Up to where each stream that runs has sent, by its node."""
        self._epoch = 0
        """The latest that a node was in: see `rt.cluster_epoch`."""
        self._epochs: dict[str, int] = {}
        """In which the nodes were that let us in, when they did."""
        self._reconciled_run = -1
        self._has_warned = False
        self._progress = ProgressFile(path, identity.origin, disk=disk)
        self._write_progress(PushState.RUNNING)

    def changed(self) -> asyncio.Event:
        """An event that is set at each change of the directory, for one stream."""
        event = asyncio.Event()
        self._changed.append(event)
        return event

    def wake(self, *, is_last: bool = False) -> None:
        """The directory may have changed; `is_last`: for the last time, so that what is left is all."""
        self.looks += is_last
        self.is_ending = self.is_ending or is_last
        self._rounds.want(is_urgent=self.is_ending)

    def settle(self, run: int) -> None:
        """That session number X has begun is on the medium: only then may a node hear of it.

        A segment is seen as soon as it has its name, and after a power cut a name that no sync covered may be
        gone: the publisher would give X to another life, which no node would take. Storage errors.
        """
        if run > self._reconciled_run:
            with storage_errors(self.path, "syncing a session's directory"):
                self.disk.sync_directory(self.path)
            self._reconciled_run = run

    def note_sending(self, end: LogOffset) -> None:
        """A stream sends all before `end` now."""
        self._rounds.note_sent(end)

    def note_sent(self, node: str, end: LogOffset) -> None:
        """All before `end` was handed over to gRPC, for one node."""
        self._sent[node] = end
        self.shared.forget(min(self._sent.values()))

    def on_progress(self) -> None:
        """A node said something, or a stream found nothing more."""
        if self.is_ending:
            self.progressed.set()

    def start(self, start: PushStart) -> None:
        """A node let us in.

        `rt.ClusterMismatch` if it is of another cluster than the others, or was forced apart from them,
        `rt.Unreachable` if it is in an earlier epoch than they are.
        """
        cluster = self.hello.cluster
        if cluster and start.cluster != cluster:
            raise ClusterMismatch(
                "the session belongs to another cluster",
                where=self.path,
                got=start.cluster.hex(),
                expected=cluster.hex(),
                hint=f"If that cluster is gone for good, remove {CLUSTER_FILE}.",
            )
        if not cluster:
            self.hello = replace(self.hello, cluster=start.cluster)
            self._remember(start.cluster)
        if check_epoch(self._epoch, start.epoch, start.node):
            if line_of(start.epoch) != line_of(self._epoch):
                for node in self._epochs:
                    self.levels.leave(node)
                self.levels.merged_place = NOWHERE  # There they may lack what was merged in the other line.
            self._epoch = start.epoch
        self._epochs[start.node] = start.epoch
        self.levels.start(start.node, start.members, start.place)
        self._sent[start.node] = start.place or NOWHERE

    def leave(self, node: str) -> None:
        """The stream to a node has ended."""
        self._epochs.pop(node, None)
        self.levels.leave(node)
        self._sent.pop(node, None)
        self._write_progress(self._progress.record.state)

    def report(self, node: str, said: PushProgress) -> None:
        """A node said how far it is. `rt.Unreachable` if others have gone on by force since it let us in."""
        check_line(line_of(self._epoch), self._epochs.get(node, self._epoch), node)
        self.levels.report(node, said)
        self._write_progress(PushState.RUNNING)
        self._rounds.on_progress(self.levels.merged_place)
        self.on_progress()

    def give_up(self, state: PushState) -> None:
        """Tell the publisher that no node takes its session."""
        self._write_progress(state)

    def close(self) -> None:
        """Release the files."""
        self._rounds.close()
        self._progress.close()

    def _look(self) -> None:
        self.shared.look()
        for event in self._changed:
            event.set()

    def _waiting_bytes(self, sent: LogOffset) -> int | None:
        """Bytes of the segment behind `sent`; None if that is not the one that grows."""
        try:
            return os.stat(segment_path(self.path, sent.segment)).st_size - sent.offset
        except OSError:
            return None

    def _write_progress(self, state: PushState) -> None:
        """A full disk is no reason to stop pushing: what is merged is what may be deleted."""
        try:
            levels = self.levels
            self._progress.write(
                replicated=levels.replicated, merged=levels.merged, state=state, lacking=levels.lacking
            )
        except StorageError as error:
            self._warn(error)

    def _remember(self, cluster: bytes) -> None:
        try:
            with storage_errors(self.path, "remembering the cluster"):
                content = sealed(_CLUSTER.pack(_MAGIC, VERSION, 0, 0, cluster))
                write_whole(self.disk, os.path.join(self.path, CLUSTER_FILE), content)
        except StorageError as error:
            self._warn(error)

    def _warn(self, error: StorageError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("progress_not_written path=%s reason=%s", self.path, error)


def _read_cluster(disk: Disk, path: str) -> bytes:
    """The cluster that was remembered; empty if there is none (readable): the nodes judge then."""
    with storage_errors(path, "reading the cluster of a session"):
        try:
            file = disk.open(os.path.join(path, CLUSTER_FILE))
        except FileNotFoundError:
            return b""
        try:
            data = file.pread(_CLUSTER.size, 0)
        finally:
            file.close()
    if len(data) < _CLUSTER.size:
        return b""
    magic, version, _, checksum, cluster = _CLUSTER.unpack(data)
    is_good = (magic, version, checksum) == (_MAGIC, VERSION, around(data))
    return bytes(cluster) if is_good else b""
