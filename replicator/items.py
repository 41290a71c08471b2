"""What a sender says to a receiver, as values. `proto/rt/v1/replication.proto` has them on the wire.

Pure. The items of a log come in log order: for each segment its bytes from offset 0 (the header first), then
that it is sealed; for a session, each life before the first byte of its X.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from rt.log.layout import Buffer
from rt.log.segment import SegmentId
from rt.log.table import TrimReason

CHUNK_BYTES_MAX: Final = 1 << 20


class Place(NamedTuple):
    """A byte place in a log: `offset` of `log.x.y`. Places sort in log order."""

    x: int
    y: int
    offset: int

    @property
    def segment(self) -> SegmentId:
        """The segment it is in."""
        return SegmentId(self.x, self.y)

    def __str__(self) -> str:
        return f"log.{self.x}.{self.y} offset {self.offset}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a segment from `place` on, `CHUNK_BYTES_MAX` at most."""

    place: Place
    data: Buffer

    @property
    def end(self) -> Place:
        """Behind them."""
        return self.place._replace(offset=self.place.offset + len(self.data))


@dataclass(frozen=True, slots=True)
class Sealed:
    """The segment ends at `place`, one past its last number or position is `end`.

    `is_last_of_x`: no segment of the same X follows.
    """

    place: Place
    end: int
    is_last_of_x: bool
    sealed_ns: int


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a publisher: what its segments of this X bear in their headers."""

    x: int
    life: bytes


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Everything before segment `before` is gone at the sender; `log_start` is the first position kept."""

    before: SegmentId
    log_start: int
    reason: TrimReason


@dataclass(frozen=True, slots=True)
class CompleteUpTo:
    """Filtered: below `position` there is nothing more that the filter lets through."""

    position: int


Item: TypeAlias = Chunk | Sealed | Life | Trimmed | CompleteUpTo
