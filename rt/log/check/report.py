"""The result of verifying a log directory.

*Damage* is bytes that were valid before but are not now, or files that contradict each other.
A *bad message* is a batch with valid checksums that no reader can decode: it was published like this, and all
copies have the same bytes. A *note* costs no message: a batch that is torn or being written, or a bad index
entry.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from rt.log.check.status import SegmentState
from rt.log.format.durable_end import DurableEnd
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import LogIdentity


class Severity(StrEnum):
    DAMAGE = "damage"
    BAD_MESSAGE = "bad message"
    NOTE = "note"


class Problem(Struct, frozen=True):
    """`offset` is where the bad header, batch, block or record starts in the file `path`."""

    severity: Severity
    what: str
    path: str
    offset: int

    def __str__(self) -> str:
        return f"{self.severity}: {self.path}, offset {self.offset}: {self.what}"


class SegmentReport(Struct, frozen=True):
    """One segment. `first` and `end` are numbers of a session, or positions of a merged log.

    Of a corrupt segment, `end` is where the valid batches or blocks stop. Of a trimmed one the counts are 0,
    and `size_bytes` is the size before the trim.
    """

    id: SegmentId
    state: SegmentState
    first: int
    end: int
    message_count: int
    batch_count: int
    size_bytes: int
    problems: tuple[Problem, ...] = ()


class Report(Struct, frozen=True):
    """`problems` are those of files that belong to no single segment.

    `identity` and `durable` are None if no file has a valid one.
    """

    path: str
    identity: LogIdentity | None
    durable: DurableEnd | None
    segments: tuple[SegmentReport, ...]
    problems: tuple[Problem, ...]

    @property
    def all_problems(self) -> list[Problem]:
        """`problems`, then those of each segment."""
        return [*self.problems, *(problem for segment in self.segments for problem in segment.problems)]

    @property
    def is_damaged(self) -> bool:
        return bool(self.damage)

    @property
    def damage(self) -> list[Problem]:
        return [problem for problem in self.all_problems if problem.severity is Severity.DAMAGE]

    @property
    def bad_messages(self) -> list[Problem]:
        return [problem for problem in self.all_problems if problem.severity is Severity.BAD_MESSAGE]
