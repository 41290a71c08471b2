"""Reads a queue from the nodes until the copy of this host follows them. So a new owner does not wait for a
process.

    nodes   ──────────► at          from the first second on
    copy        ──► at              `rt pull` has started, and brings the same events
    copy            ──────► at      it has as much: from here on it is read alone

Invariants:
- Events that the nodes or the copy have returned once are not returned again.
- Nodes that hang do not delay the copy, and a copy that hangs does not delay the nodes. The copy reports
  errors of the nodes.
- A read that is cancelled loses nothing: the next one returns its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from rt.log.scan.message_batch import MessageBatch
from rt.streams.cluster.cluster_events import ReadSizer, Split, TopicSelection, events_of
from rt.streams.cluster.log_gaps import LogGaps
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.queue.adapter import QueueGap, QueueRead, QueueReceiver

logger = logging.getLogger("rt.streams")

OPEN_S: Final = 1.0
"""The copy is opened after the first read of the nodes, and after this time at the latest, in seconds. The
process of the copy uses processor time that the first read needs.
"""
LOOK_S: Final = 1.0
"""If the copy returns nothing: how often it is checked whether the copy follows the nodes, in seconds."""


class CopyReceiver(QueueReceiver, Protocol):
    """Reads the copy of this host."""

    async def open(self) -> None:
        """Call first. On failure it must close what it opened."""

    def follows(self, position: int) -> bool:
        """Whether the nodes fill the copy now, and it was read up to `position`."""


class Feed(Protocol):
    """Reads the nodes."""

    async def read(self, messages_max: int) -> MessageBatch:
        """The next messages. Waits for them. A cancelled call must lose nothing."""

    def close(self) -> None:
        """Read no more."""


class LeadingReceiver:
    """A `QueueReceiver` from `start` on. `copy` must not be open yet, and starts at `start` or earlier.

    `nodes` starts at `start`. If the nodes have trimmed messages, `nodes` reports them to `gaps`.
    """

    def __init__(
        self,
        copy: CopyReceiver,
        nodes: Feed,
        gaps: LogGaps,
        start: SequenceToken,
        split: Split | None,
        topics: TopicSelection,
    ) -> None:
        self._copy, self._nodes, self._gaps = copy, nodes, gaps
        self.start: Final = start
        self._at = start
        """The first token that was not returned."""
        self._split, self._topics = split, topics
        self._pace = ReadSizer(split)
        self._streams: dict[str, StreamId] = {}
        self._leads = True
        """Whether the nodes are read."""
        self._is_copy_open = False
        self._has_read = asyncio.Event()
        self._opening = asyncio.create_task(self._open_copy())
        self._opening.add_done_callback(_look_at)
        self._from_copy: asyncio.Task[QueueRead | None] | None = None
        self._from_nodes: asyncio.Task[MessageBatch] | None = None
        """The reads under way."""

    @property
    def known_end(self) -> SequenceToken | None:
        return self._copy.known_end

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        if not self._leads and self._from_copy is None:
            return await self._copy.receive(events_max, timeout)
        if self._from_copy is None:
            self._from_copy = asyncio.create_task(self._read_copy(events_max))
        if self._from_nodes is None and self._leads:
            self._from_nodes = asyncio.create_task(self._read_nodes(events_max))
        reading: list[asyncio.Task[Any]] = [
            each for each in (self._from_copy, self._from_nodes) if each is not None
        ]
        await asyncio.wait(reading, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._from_copy.done():
            of_copy, self._from_copy = self._from_copy, None
            return self._passed_on_copy(of_copy.result())
        if self._from_nodes is not None and self._from_nodes.done():
            of_nodes, self._from_nodes = self._from_nodes, None
            return self._passed_on_nodes(of_nodes.result(), events_max)
        return None

    async def acknowledge(self, low: SequenceToken) -> None:
        await asyncio.shield(self._opening)
        await self._copy.acknowledge(low)

    async def close(self) -> None:
        tasks = [each for each in (self._opening, self._from_copy, self._from_nodes) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._nodes.close()
        if self._is_copy_open:
            await self._copy.close()

    async def _open_copy(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                await self._has_read.wait()
        await self._copy.open()
        self._is_copy_open = True

    async def _read_copy(self, events_max: int) -> QueueRead | None:
        await asyncio.shield(self._opening)
        return await self._copy.receive(events_max, LOOK_S)

    async def _read_nodes(self, events_max: int) -> MessageBatch:
        batch = await self._nodes.read(self._pace.messages(events_max))
        self._has_read.set()
        return batch

    def _passed_on_nodes(self, batch: MessageBatch, events_max: int) -> QueueRead | None:
        wanted = self._topics.of(batch)
        found = [] if wanted is None else events_of(wanted, self._streams, self._split)
        self._pace.brought(len(batch), sum(map(len, found)), events_max)
        return self._passed_on(found, SequenceToken(batch.end), self._gaps.take())

    def _passed_on_copy(self, read: QueueRead | None) -> QueueRead | None:
        """If the copy has reached the position of the nodes, only the copy is read from now on."""
        follows = self._copy.follows(self._at.sequence_number) if read is None else read.end >= self._at
        if self._leads and follows:
            self._leads = False
            self._nodes.close()  # The copy has everything that was read from the nodes.
            if self._from_nodes is not None:
                self._from_nodes.cancel()
        return None if read is None else self._passed_on(read.batches, read.end, read.gaps)

    def _passed_on(
        self, batches: Sequence[EventBatch], end: SequenceToken, gaps: Sequence[QueueGap]
    ) -> QueueRead | None:
        at = self._at
        gaps = [gap for gap in gaps if gap.resumed > at or gap.is_reset]
        if end <= at and not gaps:
            return None
        self._at = max(at, end)
        return QueueRead(
            [new for each in batches if (new := each.from_token(at)) is not None], self._at, gaps
        )


def _look_at(task: asyncio.Task[None]) -> None:
    """Mark the error of the task as retrieved. A call that reads or acknowledges raises it, if there is such
    a call.
    """
    if not task.cancelled():
        task.exception()
