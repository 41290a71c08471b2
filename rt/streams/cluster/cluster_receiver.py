"""Follows one cluster's log in the copy of this host. Messages that are missing in the copy are read from the
nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import rt.aio
from rt.cluster_epoch import generation_of_number
from rt.errors import RtError
from rt.events import SkipForward
from rt.log.read.reader import Place
from rt.log.scan.message_batch import MessageBatch
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_events import ReadSizer, Split, TopicSelection, events_of, position_of
from rt.streams.cluster.local_copy import check_copy, end_of, start_of
from rt.streams.cluster.log_gaps import LogGaps
from rt.streams.cluster.node_ranges import NodeLogs, NodeRangeReader
from rt.streams.cluster.store_hold import HoldFiles, StoreHold, hold_name
from rt.streams.core.errors import QueueReset
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.queue.adapter import QueueGap, QueueRead
from rt.streams.queue.queue_epoch import QueueEpoch

_END_AGAIN_S: Final = 1.0
"""How often the end of the local copy is refreshed, in seconds. Used for the lag metric only."""

_BEHIND_S: Final = 0.2
"""The wait before the nodes are asked again, in seconds, if they have fewer messages than this host."""


class ClusterReceiver:
    """A `QueueReceiver`. `open` it first."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: NodeLogs | None,
        start: SequenceToken | None,
        split: Split | None,
        store_id: str | None,
        epoch: QueueEpoch | None,
        topics: TopicSelection,
    ) -> None:
        self._directory = cluster.directory(topics.patterns)
        self._nodes = nodes
        self._start = start
        self._split = split
        self._topics = topics
        self._pace = ReadSizer(split)
        self._name = cluster.name
        self._gaps = LogGaps(cluster.stream, keeps_skips=nodes is not None)
        self._streams: dict[str, StreamId] = {}
        self._known_end: SequenceToken | None = None
        self._look_at = 0.0
        self._begun_at: int | None = None
        """Set until the first batch, if no position was requested."""
        self._is_first = True
        self._end = 0
        """The end of the messages that were read."""
        self._range: NodeRangeReader | None = None
        self._range_end = 0
        """Messages that are missing in the copy are read up to this position."""
        self._waiting: MessageBatch | None = None
        """The batch of the copy that comes after `_range_end`."""
        self._cluster = cluster
        self._store_id = store_id
        self._epoch = epoch
        self._hold_files: HoldFiles | None = None
        """Set if the subscriptions are in memory."""
        self._hold: StoreHold | None = None
        """Set if the nodes retain messages for the subscription store."""
        self._subscriber: rt.aio.Subscriber

    async def check_copy(self) -> None:
        """Call before `open`. `rt.Diverged` if a forced reset replaced what the copy has."""
        if self._epoch is not None:
            await asyncio.to_thread(check_copy, self._directory, self._epoch.log)

    async def open(self) -> None:
        """Call before anything else. On failure it closes what it opened."""
        cluster, name, position = self._cluster, self._cluster.name, self._position_wanted()
        hold = None
        if name is not None and cluster.tls is not None and self._nodes is not None:
            store_id = self._store_id
            if store_id is None:
                self._hold_files = await asyncio.to_thread(HoldFiles, self._directory, name)
                store_id = self._hold_files.id
                position = self._hold_files.position if position is None else position
            hold = StoreHold(hold_name(name, store_id), cluster.endpoints, cluster.tls)
        is_of_store = hold is not None
        beginning: Place | None = None if name is not None and not is_of_store else "earliest"
        self._subscriber = rt.aio.Subscriber(
            cluster.path,
            cluster.stream,
            endpoints=cluster.endpoints,
            tls=cluster.tls,
            position=beginning if position is None else position,
            topics=self._topics.patterns or None if cluster.endpoints else None,
            on_event=self._gaps,
            name=None if is_of_store else name,
            connect_timeout=None,
        )
        await self._subscriber.__aenter__()
        self._end = self._subscriber.position
        if self._start is None:
            self._begun_at = self._end
        if hold is not None:
            self._hold = hold
            hold.begin(position or 0)

    def _position_wanted(self) -> int | None:
        return None if self._start is None else position_of(self._start, self._split)

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

    def follows(self, position: int) -> bool:
        """Whether the nodes fill the copy now, and it was read up to `position`."""
        return self._subscriber.log_end is not None and self._subscriber.position >= position

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        await self._look_for_end()
        if self._range is None and self._waiting is None:
            self._waiting = await self._subscriber.next_batch(timeout, self._pace.messages(events_max))
        batch = self._waiting
        if self._range is None and self._is_first and self._begun_at is not None:
            await self._look_for_start(batch, self._begun_at)
        if self._range is None:
            self._begin_range(batch)
        if self._range is not None:
            return await self._read_range(self._range, events_max)
        self._require_epoch()
        self._waiting = None
        gaps = self._gaps.take()
        if batch is None:
            end = max(self._end, self._subscriber.position, *(gap.resumed.sequence_number for gap in gaps))
            return self._passed_on([], end, gaps, events_max) if gaps or end > self._end else None
        return self._passed_on([batch], batch.end, gaps, events_max)

    async def _look_for_start(self, batch: MessageBatch | None, begun_at: int) -> None:
        """Find the messages that are missing in the copy before its first messages. `batch` has the first
        messages, if they are known.
        """
        first = self._subscriber.position if batch is None else int(batch.positions[0])
        if first <= begun_at:
            return
        # The copy may start before them, with messages of other topics.
        first = min(first, await asyncio.to_thread(start_of, self._directory))
        self._begun_at = None
        if first > begun_at and self._nodes is None:
            self._gaps.add(begun_at, first, "not kept any more")
        elif first > begun_at:
            self._gaps.skips.appendleft(SkipForward(begun_at, first, "not in the copy"))

    def _begin_range(self, batch: MessageBatch | None) -> None:
        """Start to read from the nodes the messages that are missing in the copy before `batch`, its next
        batch.
        """
        skips = self._gaps.skips
        if self._nodes is not None and skips and (batch is None or skips[0].wanted < batch.positions[0]):
            skip = skips.popleft()
            generation = None if self._epoch is None else self._epoch.stored.generation
            self._range = self._nodes.reader(skip.wanted, self._topics.interest, self._gaps, generation)
            self._range_end = skip.resumed
            self._begun_at = None

    async def _read_range(self, reader: NodeRangeReader, events_max: int) -> QueueRead:
        read = await reader.read(self._range_end, self._pace.messages(events_max))
        if read.end >= self._range_end:
            self._range = None
        elif not read.batches:
            await asyncio.sleep(_BEHIND_S)  # The nodes that answer have fewer messages than the copy.
        return self._passed_on(read.batches, read.end, self._gaps.take(), events_max)

    def _passed_on(
        self, batches: Sequence[MessageBatch], end: int, gaps: Sequence[QueueGap], events_max: int
    ) -> QueueRead:
        self._end = max(self._end, end)
        of_topics = [one for batch in batches if (one := self._topics.of(batch)) is not None]
        read = [each for batch in of_topics for each in events_of(batch, self._streams, self._split)]
        if batches:
            self._pace.brought(sum(map(len, batches)), sum(map(len, read)), events_max)
        if self._is_first and batches:
            self._is_first = False
            read = [cut for each in read if (cut := each.from_token(self.start)) is not None]
        return QueueRead(read, SequenceToken(end), gaps)

    def _require_epoch(self) -> None:
        """Raise `QueueReset` if the messages that were read come after a forced reset that was not known at
        `open`.
        """
        run = self._gaps.run
        if self._epoch is not None and generation_of_number(run) > self._epoch.stored.generation:
            raise QueueReset(
                "a reset of the cluster was forced", where=self._cluster.stream, got=f"epoch {run}"
            )

    async def acknowledge(self, low: SequenceToken) -> None:
        """If there is a name, the nodes retain the messages from `low` on for this store."""
        position = position_of(low, self._split)
        if self._hold_files is not None:
            await asyncio.to_thread(self._hold_files.acknowledge, position)
        if self._hold is not None:
            self._hold.move(position)
        elif self._name is not None:
            await self._subscriber.ack(min(position, self._subscriber.position))

    async def close(self) -> None:
        try:
            if self._hold is not None:
                await self._hold.close()
        finally:
            await self._subscriber.close()

    async def _look_for_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at = now + _END_AGAIN_S
        with contextlib.suppress(RtError):  # The reader gets this error.
            end = await asyncio.to_thread(end_of, self._directory)
            self._known_end = None if end is None else SequenceToken(end)
