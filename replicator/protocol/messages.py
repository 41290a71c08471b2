"""The items that a sender sends to a receiver, as values. Pure. `proto/rt/v1/replication.proto` encodes them.

Items come in log order: the bytes of each segment from offset 0 (the header first), then its seal. In a
session each run is announced before its first byte.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct

from rt.log.format.constants import Buffer
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason

CHUNK_BYTES_MAX: Final = 1 << 20
PULLED_CHUNK_BYTES_MAX: Final = 4 << 20
"""Limit of a chunk of the merged log that is sent to a client. A busy node takes about the same time for a
message of any size. With 1 MiB a subscriber receives half the bytes.
"""
WHOLE_RUNS_MAX: Final = 128


class LogOffset(NamedTuple):
    """A byte `offset` of the segment `log.run.roll`. Offsets sort in log order."""

    run: int
    roll: int
    offset: int

    @property
    def segment(self) -> SegmentId:
        return SegmentId(self.run, self.roll)

    def __str__(self) -> str:
        return f"log.{self.run}.{self.roll} offset {self.offset}"


class Chunk(Struct, frozen=True):
    """Bytes of a segment from `start` on: `CHUNK_BYTES_MAX` at most, or `PULLED_CHUNK_BYTES_MAX`."""

    start: LogOffset
    data: Buffer

    @property
    def end(self) -> LogOffset:
        """Where the next chunk starts."""
        return self.start._replace(offset=self.start.offset + len(self.data))


class SegmentSealed(Struct, frozen=True):
    """The segment ends at `end_offset`; one past its last number or position is `end`.

    `is_last_of_run`: no segment of the same run follows.
    """

    end_offset: LogOffset
    end: int
    is_last_of_run: bool
    sealed_ns: int


class Run(Struct, frozen=True):
    """One start of a publisher. `run_id` is in the headers of all its segments."""

    number: int
    run_id: bytes


class WholeRun(Struct, frozen=True):
    """A run that had ended before any byte of it was sent. `data` is its only segment, complete.

    `end` is one past its last number. Its X has no other bytes, before or after these.
    """

    run: Run
    data: Buffer
    end: int
    sealed_ns: int

    @property
    def segment(self) -> SegmentId:
        return SegmentId(self.run.number, 0)

    @property
    def end_offset(self) -> LogOffset:
        return LogOffset(self.run.number, 0, len(self.data))

    @property
    def items(self) -> tuple[Run, Chunk, SegmentSealed]:
        """The run as separate items, in log order."""
        chunk = Chunk(LogOffset(self.run.number, 0, 0), self.data)
        return self.run, chunk, SegmentSealed(self.end_offset, self.end, True, self.sealed_ns)


class WholeRuns(Struct, frozen=True):
    """Runs of a publisher that follow each other: at most `WHOLE_RUNS_MAX`, with at most the bytes of one
    chunk.
    """

    runs: tuple[WholeRun, ...]


class LogTrimmed(Struct, frozen=True):
    """The sender trimmed everything before segment `before`. `log_start` is the first position kept."""

    before: SegmentId
    log_start: int
    reason: TrimReason


class CompleteUpTo(Struct, frozen=True):
    """In a filtered log: the filter passes no more messages below `position`."""

    position: int


Item: TypeAlias = Chunk | SegmentSealed | Run | LogTrimmed | CompleteUpTo
