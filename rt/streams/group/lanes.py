"""The messages that wait for their handlers: a lane for each partition of this member. Pure.

Invariants:
- A lane has every message of its partition from `done` to `end`, in order, each once.
- `done` moves only forward, past messages that were handled, or that are of other partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from rt.log.scan.message_batch import Message, MessageBatch
from rt.streams.core.stream_id import QueueId
from rt.streams.group.partitions import Partitions

MESSAGE_COST_BYTES: Final = 500
"""The memory that a message needs besides its contents, rounded up."""


def size_of(message: Message) -> int:
    """The approximate memory that a message needs while it waits, in bytes."""
    headers = sum(len(key) + len(value) for key, value in message.headers)
    return MESSAGE_COST_BYTES + len(message.value) + headers


class Lane:
    def __init__(self, queue: QueueId, position: int) -> None:
        self.queue = queue
        self.end = position
        """All messages of the partition before this position were queued."""
        self.acknowledged = position
        """The cluster knows that everything before this position is handled."""
        self.waiting: deque[tuple[Message, int]] = deque()
        """Messages that are not handled yet, and the index of the pattern of each."""
        self.waiting_bytes = 0
        """The approximate memory that these messages need: see `size_of`."""

    @property
    def done(self) -> int:
        """The position before which all messages of the partition are handled."""
        return self.waiting[0][0].position if self.waiting else self.end

    def add(self, message: Message, index: int) -> None:
        self.waiting.append((message, index))
        self.waiting_bytes += size_of(message)

    def handled(self, count: int) -> None:
        """Remove the first `count` messages, because they are handled."""
        for _ in range(count):
            message, _ = self.waiting.popleft()
            self.waiting_bytes -= size_of(message)


class Lanes:
    """The lanes of one member, which are filled from one reader."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._lanes: dict[QueueId, Lane] = {}
        self._places: dict[str, tuple[QueueId, int] | None] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter(tuple(self._lanes.values()))

    def __contains__(self, queue: QueueId) -> bool:
        return queue in self._lanes

    @property
    def waiting(self) -> int:
        """How many messages wait."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    @property
    def waiting_bytes(self) -> int:
        return sum(lane.waiting_bytes for lane in self._lanes.values())

    def open(self, queue: QueueId, position: int) -> Lane:
        assert queue not in self._lanes, queue
        lane = self._lanes[queue] = Lane(queue, position)
        return lane

    def close(self, lane: Lane) -> None:
        if self._lanes.get(lane.queue) is lane:
            del self._lanes[lane.queue]

    def wanted(self) -> int | None:
        """The position at which reading continues; None if there are no lanes."""
        return min((lane.end for lane in self._lanes.values()), default=None)

    def feed(self, start: int, batch: MessageBatch | None, end: int) -> list[Lane]:
        """Queue the messages of a read from `start` to `end`. Returns the lanes that have more messages now.

        Lanes whose `end` is before `start` stay as they are: the reader must go back for them.
        """
        fed = {queue: lane for queue, lane in self._lanes.items() if lane.end >= start}
        found: dict[QueueId, Lane] = {}
        for message, (queue, index) in () if batch is None else self._messages(batch, fed):
            lane = fed[queue]
            if message.position >= lane.end:
                lane.add(message, index)
                found[queue] = lane
        for lane in fed.values():
            lane.end = max(lane.end, end)
        return list(found.values())

    def unacknowledged(self) -> Mapping[str, tuple[Lane, int]]:
        """The lanes whose `done` the cluster does not know yet, with this `done`, by the name of the
        position.
        """
        return {
            self._partitions.position_name(lane.queue): (lane, lane.done)
            for lane in self._lanes.values()
            if lane.done > lane.acknowledged
        }

    def _messages(
        self, batch: MessageBatch, fed: Mapping[QueueId, Lane]
    ) -> Iterator[tuple[Message, tuple[QueueId, int]]]:
        """The messages of these lanes, with their partition and pattern."""
        places = [self._place(topic) for topic in batch.topic_names]
        places = [place if place is not None and place[0] in fed else None for place in places]
        if not any(places):
            return
        topics = [0] * len(batch) if batch.topic_index is None else batch.topic_index.tolist()
        for topic, message in zip(topics, batch.messages(), strict=True):
            if (place := places[topic]) is not None:
                yield message, place

    def _place(self, topic: str) -> tuple[QueueId, int] | None:
        if topic not in self._places:
            if len(self._places) >= 100_000:
                self._places.clear()
            self._places[topic] = self._partitions.place(topic)
        return self._places[topic]
