"""Queues that are rt streams: each cluster is a queue, each topic of its log a logical stream.

An event is a message's value, its token (position, 0). With `split` a message carries many: the token of the
i-th is (position, i). Everything that the local copy of the log still has can be read again.
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
from rt.errors import RtError
from rt.events import BadMessage, Event, HoldRefused, Reset, SkipForward
from rt.following import FollowingReader
from rt.log.directory import is_log_directory, merged_directory
from rt.log.disk import REAL
from rt.log.reader import LogReader, Place
from rt.net.tls import TLS
from rt.publisher import Publisher
from rt.streams.adapters import QueueGap, QueueRead, StreamDirection
from rt.streams.cluster_events import Pace, Split, events_of
from rt.streams.cluster_writing import ClusterWriter
from rt.streams.errors import NotWritable
from rt.streams.ids import QueueId, SequenceToken, StreamId
from rt.streams.mapping import PartitionedQueueMapper, QueueMapper

logger = logging.getLogger("rt.streams")

Level: TypeAlias = Literal["replicated", "merged"]

_END_AGAIN_S: Final = 1.0
"""How often to look how far the copy goes: for the lag that is shown only."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One of the clusters, as this host reaches it.

    To read, `path`, `endpoints`, `tls` and `name` are those of `rt.Subscriber`: with a name the nodes keep
    what is not acknowledged. To write, `writer` opens a publisher of that stream; `level` is how far events
    have to be before `publish` returns, for which it waits `level_s` at most: None for synced on this host.
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
        """Where the copy of the log is."""
        if not self.endpoints and is_log_directory(REAL, self.path):
            return self.path
        return merged_directory(self.path, self.stream)


class ClusterQueues:
    """A queue for each of `clusters`, called by their keys. Factory and adapter in one."""

    name: Final = "rt"
    is_rewindable: Final = True

    def __init__(self, clusters: Mapping[str, Cluster], *, split: Split | None = None) -> None:
        self.mapper: QueueMapper = PartitionedQueueMapper(tuple(clusters))
        self._clusters = dict(clusters)
        self._split = split
        self._writers: dict[str, ClusterWriter] = {}

    @property
    def direction(self) -> StreamDirection:
        """Written only if there is a publisher for each cluster."""
        can_write = all(cluster.writer is not None for cluster in self._clusters.values())
        return StreamDirection.READ_WRITE if can_write else StreamDirection.READ_ONLY

    async def adapter(self) -> ClusterQueues:
        """Itself."""
        return self

    async def publish(self, queue: QueueId, stream: StreamId, events: Sequence[Any]) -> None:
        """Publish values, in order; returns when they are as far as the cluster's `level` says.

        Raises what `rt.Publisher` raises. After `rt.Timeout` they may be merged all the same.
        """
        cluster = self._clusters[queue.name]
        if cluster.writer is None:
            hint = "Give its Cluster a writer."
            raise NotWritable("no publisher for that cluster", where=queue, got=stream, hint=hint)
        writer = self._writers.get(queue.name)
        if writer is None:
            writer = ClusterWriter(cluster.writer, cluster.level, cluster.level_s)
            self._writers[queue.name] = writer
        await writer.publish(stream.topic, events)

    async def receiver(self, queue: QueueId, start: SequenceToken | None) -> ClusterReceiver:
        """Open the log."""
        receiver = ClusterReceiver(self._clusters[queue.name], start, self._split)
        await receiver.open()
        return receiver

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> ClusterHistory:
        """Read a topic of the local copy."""
        cluster = self._clusters[queue.name]
        return ClusterHistory(cluster.directory, stream, start, self._split)

    async def close(self) -> None:
        """Close the publishers; what is not replicated yet goes on behind us."""
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            await writer.close()


def _position(token: SequenceToken, split: Split | None) -> int:
    """Where to read from to get the event of `token` and what follows."""
    return token.sequence_number + (split is None and token.event_index > 0)


class _Gaps:
    """What a reader tells of missing messages, from its thread, until it is told on."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._met: deque[QueueGap] = deque()

    def __call__(self, event: Event) -> None:
        match event:
            case SkipForward(wanted, resumed, reason):
                self._note(wanted, resumed, f"trimmed: {reason}")
            case BadMessage(start, end, path, offset, reason):
                self._note(start, end, f"{path}, offset {offset}: {reason}")
            case Reset(position, merged_x):
                self._note(position, position, f"the stream was reset: epoch {merged_x}")
            case HoldRefused(name, why):
                logger.warning("hold_refused queue=%s name=%s why=%r", self._where, name, why)
            case _:
                logger.info("queue_event queue=%s event=%r", self._where, event)

    def take(self) -> QueueGap | None:
        """All that was met since, in one."""
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
        self._pace = Pace(split)
        self._name = cluster.name
        self._gaps = _Gaps(cluster.stream)
        self._streams: dict[str, StreamId] = {}
        self._known_end: SequenceToken | None = None
        self._look_at = 0.0
        self._begun_at: int | None = None
        """Until the first batch, where no position was asked for."""
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
        )

    async def open(self) -> None:
        """Before anything else; what is opened is closed again where it fails."""
        await self._subscriber.__aenter__()
        if self._start is None:
            self._begun_at = self._subscriber.position

    @property
    def start(self) -> SequenceToken:
        """Where it was opened; 0 where it begins with the oldest, and no node has said yet what that is."""
        return SequenceToken(self._begun_at or 0) if self._start is None else self._start

    @property
    def known_end(self) -> SequenceToken | None:
        """Where the local copy ends, as of a second ago while `receive` is called."""
        return self._known_end

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        """What comes next; None after `timeout` seconds without any."""
        await self._look_for_end()
        batch = await self._subscriber.next_batch(timeout, self._pace.messages(events_max))
        gap = self._gaps.take()
        if batch is None:
            return None if gap is None else QueueRead([], gap.resumed, gap)
        read = events_of(batch, self._streams, self._split)
        self._pace.brought(len(batch), sum(map(len, read)), events_max)
        if self._is_first:
            self._is_first = False
            read = [cut for each in read if (cut := each.behind(self.start)) is not None]
            first = SequenceToken(int(batch.positions[0]))
            if self._begun_at is not None and first > self.start:
                gap = QueueGap(self.start, first, "not kept any more")
        return QueueRead(read, SequenceToken(batch.end), gap)

    async def acknowledge(self, low: SequenceToken) -> None:
        """Remember it, for this name, durably, and have the nodes keep what is behind it."""
        if self._name is not None:
            await self._subscriber.ack(min(_position(low, self._split), self._subscriber.position))

    async def close(self) -> None:
        """End the following."""
        await self._subscriber.close()

    async def _look_for_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at = now + _END_AGAIN_S
        with contextlib.suppress(RtError):  # Who reads will hear of it.
            end = await asyncio.to_thread(_end_of, self._directory)
            self._known_end = None if end is None else SequenceToken(end)


class ClusterHistory:
    """Reads one topic of a local copy."""

    def __init__(self, directory: str, stream: StreamId, start: SequenceToken, split: Split | None) -> None:
        self._gaps = _Gaps(directory)
        self._start = start
        self._split = split
        self._pace = Pace(split)
        self._streams: dict[str, StreamId] = {}
        self._directory = directory
        self._stream = stream
        self._reader: FollowingReader | None = None

    async def read(self, events_max: int) -> QueueRead:
        """The stream's next events; none as long as the copy is not filled so far."""
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
        read = [cut for each in read if (cut := each.behind(self._start)) is not None]
        return QueueRead(read, SequenceToken(batch.end), self._gaps.take())

    async def close(self) -> None:
        """Let go of its file."""
        if self._reader is not None:
            self._reader.close()

    def _open(self) -> bool:
        """Whether there is a copy yet."""
        if not is_log_directory(REAL, self._directory):
            return False
        self._reader = FollowingReader(
            self._directory,
            position=_position(self._start, self._split),
            topics=[self._stream.topic],
            on_event=self._gaps,
            check=lambda: None,
            may_be_ahead=True,
        )
        return True


def _end_of(directory: str) -> int | None:
    """Where a log ends; None as long as there is none."""
    if not is_log_directory(REAL, directory):
        return None
    with LogReader(directory, position="latest") as reader:
        return reader.position
