"""What a sender says to a receiver, as values. `proto/rt/v1/replication.proto` has them on the wire.

Pure. The items of a log come in log order: for each segment its bytes from offset 0 (the header first), then
that it is sealed; for a session, each life before the first byte of its X.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from rt.log.format.constants import Buffer
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason

CHUNK_BYTES_MAX: Final = 1 << 20


class LogOffset(NamedTuple):
    """A byte place in a log: `offset` of `log.X.Y`. Places sort in log order."""

    run: int
    roll: int
    offset: int

    @property
    def segment(self) -> SegmentId:
        """The segment it is in."""
        return SegmentId(self.run, self.roll)

    def __str__(self) -> str:
        return f"log.{self.run}.{self.roll} offset {self.offset}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a segment from `place` on, `CHUNK_BYTES_MAX` at most."""

    place: LogOffset
    data: Buffer

    @property
    def end(self) -> LogOffset:
        """Behind them."""
        return self.place._replace(offset=self.place.offset + len(self.data))


@dataclass(frozen=True, slots=True)
class SegmentSealed:
    """The segment ends at `place`, one past its last number or position is `end`.

    `is_last_of_run`: no segment of the same run follows.
    """

    place: LogOffset
    end: int
    is_last_of_run: bool
    sealed_ns: int


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a publisher: what its segments of this X bear in their headers."""

    run: int
    run_id: bytes


@dataclass(frozen=True, slots=True)
class LogTrimmed:
    """Everything before segment `before` is gone at the sender; `log_start` is the first position kept."""

    before: SegmentId
    log_start: int
    reason: TrimReason


@dataclass(frozen=True, slots=True)
class CompleteUpTo:
    """Filtered: below `position` there is nothing more that the filter lets through."""

    position: int


Item: TypeAlias = Chunk | SegmentSealed | Run | LogTrimmed | CompleteUpTo
