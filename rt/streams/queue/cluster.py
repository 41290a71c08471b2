"""Queues that are rt streams: each cluster is a queue, each topic of its log a logical stream.

An event is a message's value with the token (position, 0). With `split` a message carries several events: the
i-th has the token (position, i). Everything that the local copy of the log retains can be read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import rt.aio
from rt.client.follow_reader import FollowReader
from rt.client.publisher import Publisher
from rt.errors import RtError
from rt.events import BadMessage, CorruptPositions, Event, HoldRefused, Reset, SkipForward
from rt.log.disk import REAL
from rt.log.read.reader import LogReader, Place
from rt.log.scan.directory import is_log_directory, merged_directory
from rt.net.tls import TLS
from rt.streams.core.errors import NotWritable
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId
from rt.streams.queue.adapter import QueueGap, QueueRead, StreamDirection
from rt.streams.queue.cluster_events import ReadSizer, Split, events_of
from rt.streams.queue.cluster_writer import ClusterWriter
from rt.streams.queue.mapper import PartitionedQueueMapper, QueueMapper

logger = logging.getLogger("rt.streams")

Level: TypeAlias = Literal["replicated", "merged"]

_END_AGAIN_S: Final = 1.0
"""How often the end of the local copy is refreshed, in seconds. Used for the lag metric only."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One of the clusters, as this host reaches it.

    To read: `path`, `endpoints`, `tls` and `name` are those of `rt.Subscriber`. With a name the nodes retain
    what is not acknowledged. To write: `writer` opens a publisher of that stream; `level` is the durability
    that `publish` waits for, at most `level_s` seconds. None: synced on this host.
    """

    stream: str
    path: str
    endpoints: Sequence[str] = ()
    tls: TLS | None = field(default=None, repr=False)
    name: str | None = None
    writer: Callable[[], Publisher] | None = None
    level: Level | None = None
    level_s: float = 30.0

    @property
    def directory(self) -> str:
        if not self.endpoints and is_log_directory(REAL, self.path):
            return self.path
        return merged_directory(self.path, self.stream)


class ClusterQueues:
    """One queue per entry of `clusters`, named by its key. Factory and adapter in one."""

    is_rewindable: Final = True

    def __init__(self, clusters: Mapping[str, Cluster], *, split: Split | None = None) -> None:
        self.mapper: QueueMapper = PartitionedQueueMapper(tuple(clusters))
        self._clusters = dict(clusters)
        self._split = split
        self._writers: dict[str, ClusterWriter] = {}

    @property
    def direction(self) -> StreamDirection:
        """Writable only if every cluster has a publisher."""
        can_write = all(cluster.writer is not None for cluster in self._clusters.values())
        return StreamDirection.READ_WRITE if can_write else StreamDirection.READ_ONLY

    async def adapter(self) -> ClusterQueues:
        return self

    async def publish(self, queue: QueueId, stream: StreamId, events: Sequence[Any]) -> None:
        """Publish values, in order. Returns when they have reached the cluster's `level`.

        Raises what `rt.Publisher` raises. After `rt.Timeout` they may still be merged.
        """
        cluster = self._clusters[queue.name]
        if cluster.writer is None:
            hint = "Give its Cluster a writer."
            raise NotWritable(
                "this host has no publisher for the cluster", where=queue, got=stream, hint=hint
            )
        writer = self._writers.get(queue.name)
        if writer is None:
            writer = ClusterWriter(cluster.writer, cluster.level, cluster.level_s)
            self._writers[queue.name] = writer
        await writer.publish(stream.topic, events)

    async def receiver(self, queue: QueueId, start: SequenceToken | None) -> ClusterReceiver:
        receiver = ClusterReceiver(self._clusters[queue.name], start, self._split)
        await receiver.open()
        return receiver

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> ClusterHistory:
        cluster = self._clusters[queue.name]
        return ClusterHistory(cluster.directory, stream, start, self._split)

    async def close(self) -> None:
        """Close the publishers. Replication of published messages continues in the background."""
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            await writer.close()


def _position(token: SequenceToken, split: Split | None) -> int:
    """Where to start reading to get the event of `token` and what follows."""
    return token.sequence_number + (split is None and token.event_index > 0)


class _Gaps:
    """The missing messages that a reader's thread reports, until they are passed on."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._met: deque[QueueGap] = deque()

    def __call__(self, event: Event) -> None:
        match event:
            case SkipForward(wanted, resumed, reason):
                self._note(wanted, resumed, f"trimmed: {reason}")
            case BadMessage(start, end, path, offset, reason):
                self._note(start, end, f"{path}, offset {offset}: {reason}")
            case Reset(position, merged_run):
                self._note(position, position, f"the stream was reset: epoch {merged_run}")
            case CorruptPositions(start, end, reason):
                logger.error("queue_waits queue=%s start=%d end=%s why=%r", self._where, start, end, reason)
            case HoldRefused(name, why):
                logger.warning("hold_refused queue=%s name=%s why=%r", self._where, name, why)
            case _:
                logger.info("queue_event queue=%s event=%r", self._where, event)

    def take(self) -> QueueGap | None:
        """All gaps since the last call, as one."""
        met = [self._met.popleft() for _ in range(len(self._met))]
        if not met:
            return None
        return QueueGap(
            min(gap.wanted for gap in met),
            max(gap.resumed for gap in met),
            "; ".join(gap.reason for gap in met[:8]),
        )

    def _note(self, wanted: int, resumed: int, reason: str) -> None:
        logger.warning("queue_gap queue=%s wanted=%d resumed=%d why=%r", self._where, wanted, resumed, reason)
        self._met.append(QueueGap(SequenceToken(wanted), SequenceToken(resumed), reason))


class ClusterReceiver:
    """Follows one cluster's log."""

    def __init__(self, cluster: Cluster, start: SequenceToken | None, split: Split | None) -> None:
        self._directory = cluster.directory
        self._start = start
        self._split = split
        self._pace = ReadSizer(split)
        self._name = cluster.name
        self._gaps = _Gaps(cluster.stream)
        self._streams: dict[str, StreamId] = {}
        self._known_end: SequenceToken | None = None
        self._look_at = 0.0
        self._begun_at: int | None = None
        """Set until the first batch, if no position was requested."""
        self._is_first = True
        beginning: Place | None = None if cluster.name is not None else "earliest"
        self._subscriber = rt.aio.Subscriber(
            cluster.path,
            cluster.stream,
            endpoints=cluster.endpoints,
            tls=cluster.tls,
            position=beginning if start is None else _position(start, split),
            on_event=self._gaps,
            name=cluster.name,
            connect_timeout=None,
        )

    async def open(self) -> None:
        """Call first. On failure it closes what it opened."""
        await self._subscriber.__aenter__()
        if self._start is None:
            self._begun_at = self._subscriber.position

    @property
    def start(self) -> SequenceToken:
        """Where it was opened. 0 if it starts at the oldest message and no node has reported its position
        yet.
        """
        return SequenceToken(self._begun_at or 0) if self._start is None else self._start

    @property
    def known_end(self) -> SequenceToken | None:
        """The end of the local copy. At most one second old while `receive` is called."""
        return self._known_end

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        await self._look_for_end()
        batch = await self._subscriber.next_batch(timeout, self._pace.messages(events_max))
        gap = self._gaps.take()
        if batch is None:
            return None if gap is None else QueueRead([], gap.resumed, gap)
        read = events_of(batch, self._streams, self._split)
        self._pace.brought(len(batch), sum(map(len, read)), events_max)
        if self._is_first:
            self._is_first = False
            read = [cut for each in read if (cut := each.from_token(self.start)) is not None]
            first = SequenceToken(int(batch.positions[0]))
            if self._begun_at is not None and first > self.start:
                gap = QueueGap(self.start, first, "not kept any more")
        return QueueRead(read, SequenceToken(batch.end), gap)

    async def acknowledge(self, low: SequenceToken) -> None:
        """Store the position durably under this name. The nodes retain what comes after it."""
        if self._name is not None:
            await self._subscriber.ack(min(_position(low, self._split), self._subscriber.position))

    async def close(self) -> None:
        await self._subscriber.close()

    async def _look_for_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at = now + _END_AGAIN_S
        with contextlib.suppress(RtError):  # The reader gets this error.
            end = await asyncio.to_thread(_end_of, self._directory)
            self._known_end = None if end is None else SequenceToken(end)


class ClusterHistory:
    """Reads one topic of a local copy."""

    def __init__(self, directory: str, stream: StreamId, start: SequenceToken, split: Split | None) -> None:
        self._gaps = _Gaps(directory)
        self._start = start
        self._split = split
        self._pace = ReadSizer(split)
        self._streams: dict[str, StreamId] = {}
        self._directory = directory
        self._stream = stream
        self._reader: FollowReader | None = None

    async def read(self, events_max: int) -> QueueRead:
        """The stream's next events; none until the copy has reached this position."""
        if self._reader is None and not await asyncio.to_thread(self._open):
            return QueueRead([], self._start)
        assert self._reader is not None
        messages = self._pace.messages(events_max)
        batch = await asyncio.to_thread(self._reader.next_batch, 0.0, messages)
        end = max(self._start, SequenceToken(self._reader.position))
        if batch is None:
            return QueueRead([], end, self._gaps.take())
        read = events_of(batch, self._streams, self._split)
        self._pace.brought(len(batch), sum(map(len, read)), events_max)
        read = [cut for each in read if (cut := each.from_token(self._start)) is not None]
        return QueueRead(read, SequenceToken(batch.end), self._gaps.take())

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _open(self) -> bool:
        """Whether a copy exists yet."""
        if not is_log_directory(REAL, self._directory):
            return False
        self._reader = FollowReader(
            self._directory,
            position=_position(self._start, self._split),
            topics=[self._stream.topic],
            on_event=self._gaps,
            check=lambda: None,
            may_be_ahead=True,
        )
        return True


def _end_of(directory: str) -> int | None:
    """The end of a log; None if it does not exist yet."""
    if not is_log_directory(REAL, directory):
        return None
    with LogReader(directory, position="latest") as reader:
        return reader.position
