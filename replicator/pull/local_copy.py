"""The copy that a pull client keeps: made when its cluster is known, checked when it is opened.

Invariants:
- A directory holds one log only: of one cluster, whole or filtered by the same topics.
- The copy never follows a node in an earlier epoch than the latest one that it followed, even after a
  restart.
- Nothing is reported as synced before it is synced.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from msgspec.structs import replace

from replicator.protocol.epoch_check import check_epoch, check_line
from replicator.protocol.handshake import (
    Acknowledged,
    HoldRejected,
    PullMerged,
    PullStart,
    Wanted,
    check_found,
)
from replicator.protocol.messages import Chunk, CompleteUpTo, Item, LogOffset, LogTrimmed, SegmentSealed
from replicator.receive.merged_receiver import MergedReceiver
from rt.cluster_epoch import EPOCH_END
from rt.errors import ClusterMismatch, Corrupt, InvalidName, ProtocolViolation
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.log.read.start_position import StartTime
from rt.log.read.topic_patterns import check_wanted
from rt.log.scan.directory import is_log_directory, read_file, read_identity
from rt.log.whole_files import write_whole
from rt.log.write.writer import SyncPoint

logger = logging.getLogger("replicator")

Retention: TypeAlias = Literal["follow", "own"]

TOPICS_FILE: Final = "topics"
"""JSON, the sorted topics and patterns of a filtered copy. It is written before the log."""
EPOCH_FILE: Final = "epoch"
"""JSON, the latest epoch of a node that this copy followed, as `rt.cluster_epoch` names it."""
_EPOCH_BYTES_MAX: Final = 32
_TOPICS_BYTES_MAX: Final = 2 * 2**20


class LocalCopy:
    """The local side of a pull. Nothing is written to disk before a node has identified its log.

    `position` and `topics` are those of `PullMerged`; the position counts only while there is no copy yet. A
    time is searched once, by the first node that is followed. After that, the position that it found counts.
    `line`: only nodes in epochs of that line are followed (`rt.cluster_epoch.line_of`); None: nodes of any
    line. For one thread at a time; `sync_to` may run in another one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        position: Wanted = "earliest",
        topics: Sequence[str] = (),
        retention: Retention = "follow",
        name: str | None = None,
        line: int | None = None,
        disk: Disk = REAL,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._stream = stream
        self._position = position
        self._topics = check_wanted(topics).patterns
        self._retention = retention
        self._name = name
        self._line = line
        self._epoch = 0  # The latest that is known; 0: none.
        self._disk = disk
        self._receiver: MergedReceiver | None = None

    @property
    def receiver(self) -> MergedReceiver | None:
        """The writer of the copy; None before there is one."""
        return self._receiver

    @property
    def position(self) -> int:
        """One past the last position that is here, or known to be filtered out."""
        return 0 if self._receiver is None else self._receiver.end

    @property
    def next_offset(self) -> LogOffset | None:
        """Where the copy ends; None before there is one."""
        return None if self._receiver is None else self._receiver.next_offset

    @property
    def disk(self) -> Disk:
        return self._disk

    @property
    def is_filtered(self) -> bool:
        return bool(self._topics)

    def aside(self, path: str, position: int) -> LocalCopy:
        """Another copy of the same log, in `path`. It starts with the segment that holds `position`."""
        return LocalCopy(
            path,
            self._stream,
            position=position,
            topics=self._topics,
            retention="own",
            line=self._line,
            disk=self._disk,
        )

    def open(self) -> None:
        """Open the copy if it exists; it stays locked until `close`.

        `rt.InvalidName` if it is another log; `rt.Corrupt`, `rt.DirectoryLocked`, storage errors.
        """
        with storage_errors(self.path, "opening a copy"):
            if self._receiver is not None or not is_log_directory(self._disk, self.path):
                return
            identity = read_identity(self._disk, self.path, name=self._stream)
        self._check_topics()
        self._epoch = self._read_epoch()
        wanted = LogIdentity(self._kind, identity.origin, self._stream)
        if identity != wanted:
            raise InvalidName(
                "the directory belongs to another log",
                where=self.path,
                got=f"{identity.kind.name} {identity.name}",
                expected=f"{wanted.kind.name} {wanted.name}",
                hint="Give each pull a directory of its own.",
            )
        self._open(identity)

    def request(self) -> PullMerged:
        """The request to a node: to continue where the copy ends."""
        receiver = self._receiver
        wanted = PullMerged(
            position=self._position, topics=self._topics, name=self._name, acknowledged=self.acknowledged()
        )
        if receiver is None:
            return wanted
        receiver.drop_unfinished()
        wanted = replace(wanted, cluster=receiver.identity.origin)
        if receiver.next_offset is None:
            return wanted
        end, chain = receiver.end, receiver.last_checksum
        position: Wanted = self._position if isinstance(self._position, StartTime) else "earliest"
        return replace(wanted, offset=receiver.next_offset, end=end, chain=chain, position=position)

    def acknowledged(self) -> Acknowledged | None:
        """What the subscriber does not need any more; None if unknown. May run during `append`."""
        return None

    def on_hold_refused(self, refused: HoldRejected) -> None:
        """The nodes hold nothing for the subscriber."""
        logger.warning("hold_refused name=%s why=%r", refused.name, refused.why)

    def on_corrupt(self, start: int, end: int | None, why: str) -> None:
        """No node has good bytes of positions `start` to `end` (None: unknown)."""
        logger.warning("no_good_bytes path=%s start=%d end=%s why=%r", self.path, start, end, why)

    def on_unreached(self, why: str) -> None:
        """No node was reached yet."""

    def start(self, start: PullStart) -> None:
        """Continue according to the answer of a node.

        `rt.ClusterMismatch` if the node is of another cluster, or a forced reset separated it;
        `rt.Unreachable` if it is in an earlier epoch; `rt.ProtocolViolation`.
        """
        check_line(self._line, start.epoch, start.node)
        check_found(self._position, start)
        is_later = check_epoch(self._epoch, start.epoch, start.node)
        if self._receiver is None:
            with storage_errors(self.path, "making a copy"):
                self._disk.make_directory(self.path)
                if self._topics:
                    path = os.path.join(self.path, TOPICS_FILE)
                    write_whole(self._disk, path, json.dumps(self._topics).encode())
            self._open(LogIdentity(self._kind, start.cluster, self._stream))
        assert self._receiver is not None
        if start.cluster != self._receiver.identity.origin:
            raise ClusterMismatch(
                "the node is of another cluster",
                where=start.node,
                got=start.cluster.hex(),
                expected=self._receiver.identity.origin.hex(),
                hint="Pull into another directory.",
            )
        self._receiver.start_at(start.offset, start.first)
        if isinstance(self._position, StartTime) and start.found is not None:
            self._position = start.found.position
        if is_later:
            self._save_epoch(start.epoch)

    def is_quick(self, item: Item) -> bool:
        """Whether `append` is one short write at most."""
        if isinstance(item, Chunk):
            return self._receiver is not None and self._receiver.is_quick(item)
        return isinstance(item, CompleteUpTo)

    def append(self, item: Item) -> None:
        """Store what a node sent; the errors of the receiver."""
        receiver = self._receiver
        assert receiver is not None
        match item:
            case Chunk():
                receiver.append(item)
            case SegmentSealed():
                receiver.seal(item)
            case LogTrimmed():
                receiver.follow_trim(item)
            case CompleteUpTo():
                receiver.complete(item)
            case _:
                raise ProtocolViolation("not an item of a merged log", got=type(item).__name__)

    def sync_point(self) -> SyncPoint | None:
        """The point up to which data was appended, for `sync_to`; None if all is known to be durable. Never
        call it during `append`.
        """
        return None if self._receiver is None else self._receiver.sync_point()

    def sync_to(self, point: SyncPoint | None) -> int:
        """Return when everything up to `point` is on disk. The result is the position up to which everything
        is on disk.

        It may run during `append`, but not during `close`.
        """
        receiver = self._receiver
        if receiver is None:
            return 0
        if point is not None:
            receiver.sync_to(point)
        receiver.record_synced(point)
        return receiver.durable_end

    def tidy(self) -> None:
        """Called after each sync. Never during `append`."""

    def close(self) -> None:
        """Release the files. Does not sync."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    @property
    def _kind(self) -> LogKind:
        return LogKind.FILTERED if self._topics else LogKind.MERGED

    def _open(self, identity: LogIdentity) -> None:
        self._receiver = MergedReceiver.open(
            self.path, identity, disk=self._disk, follows_trims=self._retention == "follow"
        )

    def _save_epoch(self, epoch: int) -> None:
        path = os.path.join(self.path, EPOCH_FILE)
        with storage_errors(path, "remembering the epoch of a copy"):
            write_whole(self._disk, path, json.dumps(epoch).encode())
        self._epoch = epoch

    def _read_epoch(self) -> int:
        path = os.path.join(self.path, EPOCH_FILE)
        data = read_file(self._disk, path, _EPOCH_BYTES_MAX, doing="reading the epoch of a copy")
        if data is None:
            return 0
        try:
            epoch = json.loads(data)
        except ValueError:
            epoch = None
        if not isinstance(epoch, int) or not 0 <= epoch < EPOCH_END:
            hint = "Remove the file: the copy then follows any node that answers."
            raise Corrupt("the epoch of a copy cannot be read", path=path, offset=0, got=data, hint=hint)
        return epoch

    def _check_topics(self) -> None:
        path = os.path.join(self.path, TOPICS_FILE)
        data = read_file(self._disk, path, _TOPICS_BYTES_MAX, doing="reading the topics of a copy")
        known: tuple[str, ...] = () if data is None else tuple(json.loads(data))
        if known != self._topics:
            raise InvalidName(
                "the copy was started with other topics",
                where=self.path,
                got=", ".join(self._topics) or "all",
                expected=", ".join(known) or "all",
                hint="Give each filter a directory of its own.",
            )
