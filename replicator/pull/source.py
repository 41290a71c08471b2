"""The source of the items of a pull: the log, the offset in it, and the items that are sent before the first
byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from replicator.protocol.handshake import (
    WAYPOINTS_MAX,
    LogOutline,
    PullMerged,
    PullRange,
    PullSession,
    PullStart,
)
from replicator.protocol.known_nodes import KnownNodes
from replicator.protocol.messages import Chunk, Item, LogOffset, LogTrimmed, SegmentSealed
from replicator.pull.memory_budget import BudgetGrant
from replicator.pull.negotiation import (
    check_next_block,
    find_time,
    log_end,
    plan_filtered,
    plan_merged,
    plan_range,
    plan_session,
)
from replicator.send.sender import Sender
from replicator.send.topic_filter import FilteredScan
from rt.errors import ClusterMismatch
from rt.log.disk import Disk
from rt.log.read.outline import Waypoint, outline
from rt.log.read.start_position import StartTime
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_identity
from rt.net.grpc_errors import NothingMergedYet, Unreachable

_BEYOND: Final = LogOffset(2**32, 0, 0)  # After every offset: the end of a range that is not whole here yet.


RECENT_BYTES: Final = 256 * 2**20
"""The end of the merged log that the event loop reads: the last seconds of a full load."""


class LogProvider(Protocol):
    """The logs of a node, as the pull server needs them."""

    @property
    def cluster(self) -> bytes: ...

    @property
    def epoch(self) -> int:
        """The epoch of the cluster: see `rt.cluster_epoch`."""

    @property
    def node(self) -> str: ...

    @property
    def nodes(self) -> KnownNodes:
        """The voting members of the cluster, once they have changed."""

    @property
    def merged(self) -> str:
        """The directory of the merged log; it may not exist yet."""

    @property
    def is_empty(self) -> bool:
        """Whether this node is up to date and knows that the cluster has merged nothing so far."""

    def session(self, session_id: int) -> str:
        """The directory of a session replica. `rt.LogNotFound` if there is none."""


class TrimOvertake:
    """Whether trimming has overtaken a receiver of the merged log: the data that it needed next was trimmed.

    Follows one stream, which begins at `place`. If `place` is not within a segment, it has position `first`.
    Without trimming, the items are contiguous. A gap is a segment that was left before all of it was
    returned, or segments that were skipped.
    """

    def __init__(self, wanted: PullMerged, place: LogOffset, first: int) -> None:
        at = wanted.end if wanted.offset is not None else wanted.position
        self.is_overtaken = isinstance(at, int) and first > at
        """Set once data is missing. The code that records it also resets it."""
        self._segment = place.segment if place.offset else None
        """The unfinished segment; None between two segments."""
        self._end = first  # Between two segments: the position that comes next.
        self._log_start = 0

    def follow(self, items: Iterable[Item]) -> None:
        for item in items:
            match item:
                case LogTrimmed():
                    self._log_start = item.log_start
                case SegmentSealed():
                    self._segment, self._end = None, item.end
                case Chunk():
                    is_gap = self._segment not in {None, item.start.segment}
                    is_late = self._segment is None and self._end < self._log_start
                    self.is_overtaken |= is_gap or is_late
                    self._segment = item.start.segment


class PullSource(Struct):
    """The start of one stream, and the items after it. For one thread at a time. Close its sender."""

    start: PullStart
    sender: Sender
    filtering: FilteredScan | None = None
    first_items: list[Item | LogOutline] = field(default_factory=list)
    overtaking: TrimOvertake | None = None  # Of a merged log.
    end_offset: LogOffset | None = None  # Where the range ends; None if there is no end.
    is_idle: bool = False  # Whether the last poll found nothing new in the log.
    waypoints: Iterator[Waypoint] | None = None  # An outline that is sent before anything else.

    @property
    def is_done(self) -> bool:
        """Whether everything that was requested was returned."""
        return self.waypoints is None and not self.first_items and self.is_at_end

    @property
    def is_at_end(self) -> bool:
        """Whether no more bytes of the log are needed."""
        return self.end_offset is not None and self.sender.next_offset >= self.end_offset

    def is_recent(self, grant: BudgetGrant) -> bool:
        """Whether the next bytes were just merged and are in memory.

        Then the event loop reads them: in a thread each system call waits for the interpreter lock.
        """
        is_plain = self.filtering is None and self.overtaking is not None
        return is_plain and self.sender.is_recent(RECENT_BYTES, grant.read_bytes)

    def items(self, grant: BudgetGrant) -> list[Item | LogOutline]:
        """The next items, within the grant. If `is_idle` is set, there are no more items before the log
        changes.
        """
        if self.waypoints is not None:
            if part := tuple(islice(self.waypoints, WAYPOINTS_MAX)):
                return [LogOutline(part)]
            self.waypoints = None
        ready, self.first_items = self.first_items, []
        if self.is_done:
            return ready
        read_bytes = grant.read_bytes if self.filtering is None else grant.read_bytes // 3
        found = self.sender.items(read_bytes, chunk_bytes=grant.chunk_bytes)
        if self.overtaking is not None:
            self.overtaking.follow(found)
        self.is_idle = not found
        if self.end_offset is not None:
            found = _before(self.end_offset, found)
        if self.filtering is None:
            return [*ready, *found]
        made = self.filtering.items(found, chunk_bytes=grant.chunk_bytes)
        if self.is_at_end:
            made.append(self.filtering.complete())
        return [*ready, *made]


class SourceOpener:
    """Finds out where streams begin. `check_reach` is the one of `PullServicer`."""

    def __init__(self, logs: LogProvider, disk: Disk, check_reach: Callable[[str, int], None]) -> None:
        self._logs, self._disk, self._check_reach = logs, disk, check_reach

    def open(self, wanted: PullMerged | PullSession) -> PullSource:
        """Find out where a stream begins. Blocks: it reads the disk."""
        logs, disk = self._logs, self._disk
        if isinstance(wanted, PullSession):
            path = logs.session(wanted.session_id)
            self._check_reach(segment_path(path, wanted.offset.segment), wanted.offset.offset)
            beginning = plan_session(disk, path, wanted)
            identity = read_identity(disk, path)
            start = PullStart(
                identity.origin, logs.epoch, logs.node, *beginning, identity.name, identity.dedup_id
            )
            return PullSource(start, Sender(path, beginning.offset, disk=disk))
        try:
            return self._open_merged(logs.merged, wanted)
        except NothingMergedYet as error:
            if logs.is_empty:
                raise
            raise Unreachable(
                "this node has nothing of the log yet", where=logs.merged, hint="Ask another."
            ) from error

    def _open_merged(self, path: str, wanted: PullMerged) -> PullSource:
        disk = self._disk
        check_cluster(wanted, self._logs.cluster)
        if isinstance(wanted.position, StartTime):
            found = find_time(disk, path, wanted, wanted.position.timestamp_ns)
            source = self._open_merged(path, replace(wanted, position=found.position))
            source.start = replace(source.start, found=found)
            return source
        if wanted.range is not None:
            return self._open_range(path, wanted, wanted.range)
        if wanted.topics:
            return self._open_filtered(path, wanted)
        if wanted.offset is not None:
            self._check_reach(segment_path(path, wanted.offset.segment), wanted.offset.offset)
        beginning = plan_merged(disk, path, wanted)
        if wanted.offset is not None and beginning.offset.offset:
            check_next_block(disk, path, beginning.offset)
        sender = Sender(path, beginning.offset, disk=disk)
        overtaking = TrimOvertake(wanted, *beginning)
        return PullSource(self._merged_start(path, *beginning), sender, overtaking=overtaking)

    def _open_filtered(self, path: str, wanted: PullMerged) -> PullSource:
        beginning, middle = plan_filtered(self._disk, path, wanted)
        place, end, first_items = beginning.offset, beginning.first, list[Item | LogOutline]()
        if middle is None and wanted.offset is not None and beginning.first == wanted.end:
            # The receiver's segment ends where the receiver is. This end is sent before the next segment
            # begins.
            sealed_ns = time.time_ns()
            first_items.append(
                SegmentSealed(wanted.offset, wanted.end, is_last_of_run=False, sealed_ns=sealed_ns)
            )
            place = wanted.offset
        filtering = FilteredScan(
            wanted.topics,
            scanner=middle and middle.scanner,
            header=middle and middle.header,
            offset=middle and wanted.offset,
            end=end,
        )
        source = beginning.offset if middle is None else middle.offset
        start = self._merged_start(path, place, beginning.first)
        sender = Sender(path, source, disk=self._disk)
        return PullSource(
            start, sender, filtering, first_items, TrimOvertake(wanted, source, beginning.first)
        )

    def _open_range(self, path: str, wanted: PullMerged, until: PullRange) -> PullSource:
        disk = self._disk
        place, first = plan_merged(disk, path, PullMerged())
        if isinstance(wanted.position, int):
            first = max(first, wanted.position)
        items, filtering = list[Item | LogOutline](), None
        waypoints: Iterator[Waypoint] | None = None
        begin = end = place  # Start and end of the blocks to read: none yet.
        if first < until.end and until.outline_bytes:
            waypoints = outline(disk, path, first, until.end, stride_bytes=until.outline_bytes)
        elif first < until.end:
            found = plan_range(disk, path, first, until.end)
            place, begin, end = found.offset, found.offset, found.end_offset or _BEYOND
            if wanted.topics:
                header, filtering = FilteredScan.within(
                    wanted.topics, found.middle.scanner, found.middle.header, first
                )
                items.append(header)
                place = header.end
            else:
                items += found.first_items
            first = found.first
        start, sender = self._merged_start(path, place, first), Sender(path, begin, disk=disk)
        return PullSource(start, sender, filtering, items, end_offset=end, waypoints=waypoints)

    def _merged_start(self, path: str, place: LogOffset, first: int) -> PullStart:
        logs = self._logs
        return PullStart(logs.cluster, logs.epoch, logs.node, place, first, end=log_end(self._disk, path))


def check_cluster(wanted: PullMerged, cluster: bytes) -> None:
    """`rt.ClusterMismatch` if the copy, or the position, is of another cluster."""
    if wanted.cluster not in {b"", cluster}:
        raise ClusterMismatch(
            "the copy is of another cluster",
            got=wanted.cluster.hex(),
            expected=cluster.hex(),
            hint="Pull into another directory.",
        )


def _before(end: LogOffset, items: list[Item]) -> list[Item]:
    """The items before `end`. A chunk that goes beyond `end` is cut there."""
    before: list[Item] = []
    for item in items:
        if isinstance(item, Chunk):
            if item.start >= end:
                break
            if item.end > end:
                before.append(Chunk(item.start, memoryview(item.data)[: end.offset - item.start.offset]))
                break
        before.append(item)
    return before
