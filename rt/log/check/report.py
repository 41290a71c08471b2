"""The result of verifying a log directory.

A problem has one of three severities:
- *Damage*: bytes that were valid once and are not now, or files that contradict each other. Messages may be
  missing. Another copy may have them.
- *Bad message*: a batch with valid checksums that no reader can decode. It was published like this, and all
  copies have the same bytes, so no repair helps.
- *Note*: costs no message. A batch that is torn or being written, or a bad index entry.
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
    """One finding. `offset` is where the bad header, batch, block or record starts in the file `path`."""

    severity: Severity
    what: str
    path: str
    offset: int

    def __str__(self) -> str:
        return f"{self.severity}: {self.path}, offset {self.offset}: {self.what}"


class SegmentReport(Struct, frozen=True):
    """One segment. `first` and `end` are numbers of a session, or positions of a merged log.

    In a corrupt segment, `end` is where the valid batches or blocks stop. In a trimmed one the counts are 0,
    and `size_bytes` is the size before the trim. `problems` are those of the segment's own files.
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
    """All findings in the directory `path`. `problems` are those of files that belong to no single segment.

    `identity` comes from the segment table, or else from the segments' headers. It and `durable` are None if
    no file has a valid one.
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
