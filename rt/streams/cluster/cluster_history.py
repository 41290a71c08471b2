"""Reads one topic of a cluster again: from the copy of this host, and from the nodes if messages are missing
in the copy.

Invariant: only messages that the nodes have trimmed are a gap. Without nodes, only the log directory is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from rt.client.follow_reader import FollowReader
from rt.errors import Corrupt
from rt.log.disk import REAL
from rt.log.read.projection import Projection
from rt.log.read.topic_patterns import TopicPatterns
from rt.log.scan.catalog import read_catalog
from rt.log.scan.directory import is_log_directory
from rt.log.scan.message_batch import MessageBatch
from rt.streams.cluster.cluster_events import ReadSizer, Split, events_of, position_of
from rt.streams.cluster.log_gaps import LogGaps
from rt.streams.cluster.node_ranges import NodeLogs, NodeRangeReader
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.queue.adapter import QueueRead

_ELSEWHERE_POSITIONS: Final = 65_536
"""How many positions are read from the nodes before a copy is tried again, if the copy is corrupt or does not
reach far enough.
"""


class ClusterHistory:
    """`directory` is the copy. `nodes` is the log of the nodes; None if there are no nodes. `generation`: see
    `NodeLogs`.
    """

    def __init__(
        self,
        directory: str,
        nodes: NodeLogs | None,
        stream: StreamId,
        start: SequenceToken,
        split: Split | None,
        generation: int | None = None,
    ) -> None:
        self._directory = directory
        self._generation = generation
        self._nodes = nodes
        self._stream = stream
        self._at = start
        """The first token that was not returned."""
        self._split = split
        self._pace = ReadSizer(split)
        self._streams: dict[str, StreamId] = {}
        self._gaps = LogGaps(directory, keeps_skips=nodes is not None)
        self._copy: FollowReader | None = None
        self._range: NodeRangeReader | None = None
        self._lacking_until = 0
        """Messages before this position are missing in the copy."""

    async def read(self, events_max: int) -> QueueRead:
        """The stream's next events. Without nodes, there are none until the copy has reached this
        position.
        """
        messages = self._pace.messages(events_max)
        if not await asyncio.to_thread(self._has_copy):
            return await self._read_nodes(messages, events_max)
        assert self._copy is not None
        try:
            batch = await asyncio.to_thread(self._copy.next_batch, 0.0, messages)
        except Corrupt:
            if self._nodes is None:
                raise
            self._leave_copy(self._position + _ELSEWHERE_POSITIONS)
            return await self._read_nodes(messages, events_max)
        if self._gaps.skips:  # The copy was trimmed meanwhile, or has a hole.
            self._leave_copy(self._gaps.skips[-1].resumed)
            return await self._read_nodes(messages, events_max)
        end = SequenceToken(self._copy.position if batch is None else batch.end)
        if self._nodes is not None and batch is None and end <= self._at:
            self._leave_copy(self._position + _ELSEWHERE_POSITIONS)
            return await self._read_nodes(messages, events_max)
        return self._passed_on([] if batch is None else [batch], end, events_max)

    async def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    @property
    def _position(self) -> int:
        return position_of(self._at, self._split)

    async def _read_nodes(self, messages: int, events_max: int) -> QueueRead:
        if self._nodes is None:
            return QueueRead([], self._at)
        if self._range is None:
            interest = Projection(topics=frozenset([self._stream.topic]))
            self._range = self._nodes.reader(self._position, interest, self._gaps, self._generation)
        read = await self._range.read(self._lacking_until or None, messages)
        return self._passed_on(read.batches, SequenceToken(read.end), events_max)

    def _passed_on(self, batches: Sequence[MessageBatch], end: SequenceToken, events_max: int) -> QueueRead:
        found: list[EventBatch] = []
        for batch in batches:
            found += events_of(batch, self._streams, self._split)
        if batches:
            self._pace.brought(sum(map(len, batches)), sum(map(len, found)), events_max)
        found = [cut for each in found if (cut := each.from_token(self._at)) is not None]
        self._at = max(self._at, end)
        return QueueRead(found, self._at, self._gaps.take())

    def _has_copy(self) -> bool:
        """Whether the copy has the next messages, or will have them. If so, the copy is open on return. Runs
        in a thread.
        """
        if self._copy is not None:
            return True
        if not is_log_directory(REAL, self._directory):
            self._lacking_until = 0
            return False
        if self._nodes is not None:
            catalog = read_catalog(REAL, self._directory)
            self._lacking_until = max(self._lacking_until, catalog.start) if catalog.kept else 0
            if not catalog.kept or self._position < self._lacking_until:
                return False
        self._range = None
        self._copy = FollowReader(
            self._directory,
            position=self._position,
            topics=TopicPatterns.named([self._stream.topic]).patterns,
            on_event=self._gaps,
            check=lambda: None,
            may_be_ahead=True,
        )
        return True

    def _leave_copy(self, until: int) -> None:
        assert self._copy is not None
        self._copy.close()
        self._copy = None
        self._gaps.skips.clear()
        self._lacking_until = until
