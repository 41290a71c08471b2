"""Which queue carries a stream.

Invariants:
- The mapping depends only on the stream's name and the queues. Events already in a queue are not moved.
- Clusters are placed by consistent hashing of their names, in any order. An added cluster takes streams from
  all others and moves no other stream. A removed cluster gives its streams to all others.
- Numbered queues lie at equal distances, so their shares are even. If their number changes, the mapping
  changes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from fnmatch import translate
from hashlib import blake2b
from typing import Final, Protocol

from msgspec import Struct

from rt.errors import InvalidOption
from rt.names import check_name
from rt.streams.core.stream_id import RING_BITS, RING_SIZE, QueueId, StreamId

QUEUES_MAX: Final = 65_536
DEFAULT_QUEUES: Final = 8
VIRTUAL_NODES: Final = 256
"""Points per partition on the ring. The share of a partition then differs from the mean by a sixteenth
(standard deviation), whatever the number of partitions.
"""


class RingRange(Struct, frozen=True):
    """Positions from `start` up to `end`, around the ring. The whole ring if the two are equal."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not (0 <= self.start < RING_SIZE and 0 <= self.end <= RING_SIZE):
            raise ValueError(f"ring range: got {self.start} to {self.end}, expected positions up to 2^32")

    def __contains__(self, place: int) -> bool:
        if self.start < self.end:
            return self.start <= place < self.end
        return self.start == self.end or place >= self.start or place < self.end


def ring_points(names: Collection[str], points: int) -> list[tuple[int, str]]:
    """The positions of `points` points of each name, in the order of the ring. If several names get the same
    position, the smallest name has it.
    """
    places: dict[int, str] = {}
    for name in sorted(set(names), reverse=True):
        for point in range(points):
            digest = blake2b(f"{name}\n{point}".encode(), digest_size=RING_BITS // 8).digest()
            places[int.from_bytes(digest)] = name
    return sorted(places.items())


class QueueMapper(Protocol):
    """The queues, and which of them carries a stream. Must be constant."""

    @property
    def queues(self) -> tuple[QueueId, ...]:
        """All queues, in the order of the ring."""

    def queue_for(self, stream: StreamId) -> QueueId: ...

    def queues_in(self, part: RingRange) -> tuple[QueueId, ...]:
        """The queues whose position lies in `part`."""


class HashRingQueueMapper:
    """Queues `<prefix>-0` to `<prefix>-<count - 1>` at equal distances on the ring.

    A stream belongs to the first queue at or after its hash, around the ring. `InvalidOption` for a count
    below 1 or above 65,536.
    """

    def __init__(self, count: int = DEFAULT_QUEUES, prefix: str = "queue") -> None:
        self._place([f"{prefix}-{index}" for index in range(count)] if count <= QUEUES_MAX else [], count)

    @classmethod
    def of_names(cls, names: Sequence[str]) -> HashRingQueueMapper:
        """The same mapper, but with these names, which must be different."""
        mapper = cls.__new__(cls)
        mapper._place(names, len(names))
        return mapper

    def _place(self, names: Sequence[str], count: int) -> None:
        _check_count(count)
        portion = 0 if count == 1 else RING_SIZE // count + 1
        self._queues = tuple(
            QueueId(portion * index, check_name(name, kind="queue")) for index, name in enumerate(names)
        )
        self._positions = [queue.ring_position for queue in self._queues]
        assert self._positions[-1] < RING_SIZE

    @property
    def queues(self) -> tuple[QueueId, ...]:
        return self._queues

    def queue_for(self, stream: StreamId) -> QueueId:
        return self.queue_at(stream.ring_hash)

    def queue_at(self, place: int) -> QueueId:
        """The first queue at or after a position of the ring."""
        index = bisect_left(self._positions, place)
        return self._queues[index if index < len(self._queues) else 0]

    def queues_in(self, part: RingRange) -> tuple[QueueId, ...]:
        return tuple(queue for queue in self._queues if queue.ring_position in part)


class PartitionedQueueMapper:
    """Consistent hashing over partitions that have names, such as clusters. A queue has its partition's name.

    A stream belongs to the partition with the first point at or after the stream's hash, around the ring. The
    order of `partitions` does not matter. `placement` maps patterns of topics (`*`, `?`, `[…]`) to
    partitions; the first one that matches a stream counts.
    """

    def __init__(self, partitions: Sequence[str], placement: Mapping[str, str] | None = None) -> None:
        if len(set(partitions)) != len(partitions):
            raise InvalidOption("a partition is named more than once", got=", ".join(partitions)[:200])
        _check_count(len(partitions))
        names = [check_name(name, kind="queue") for name in partitions]
        by_name = {name: QueueId(place, name) for name in names for place, _ in ring_points([name], 1)}
        self._queues = tuple(sorted(by_name.values()))
        points = ring_points(names, VIRTUAL_NODES)
        self._positions = [place for place, _ in points]
        self._owners = [by_name[name] for _, name in points]
        self._placed: list[tuple[re.Pattern[str], QueueId]] = []
        for pattern, name in (placement or {}).items():
            if name not in by_name:
                raise InvalidOption(
                    "a stream is placed on a partition that does not exist",
                    where=pattern,
                    got=name,
                    expected=", ".join(partitions)[:200],
                )
            self._placed.append((re.compile(translate(pattern)), by_name[name]))

    @property
    def queues(self) -> tuple[QueueId, ...]:
        return self._queues

    def queue_for(self, stream: StreamId) -> QueueId:
        for pattern, queue in self._placed:
            if pattern.fullmatch(stream.topic):
                return queue
        index = bisect_left(self._positions, stream.ring_hash)
        return self._owners[index if index < len(self._owners) else 0]

    def queues_in(self, part: RingRange) -> tuple[QueueId, ...]:
        return tuple(queue for queue in self._queues if queue.ring_position in part)


def _check_count(count: int) -> None:
    if not 1 <= count <= QUEUES_MAX:
        raise InvalidOption("invalid number of queues", got=count, expected=f"1 to {QUEUES_MAX:,}")
