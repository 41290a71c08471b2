"""What verifying a log directory found, as values.

*Damage* is bytes that were known to be good and are not, or parts that contradict each other. A *note* is
what costs nobody a message: a batch that is torn or just being written, an index entry that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rt.log.durable import DurableEnd
from rt.log.segment import SegmentId
from rt.log.status import State
from rt.log.table import Identity


class Severity(StrEnum):
    """What a problem means."""

    DAMAGE = "damage"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and the byte of which file where the bad header, batch, block or record starts."""

    severity: Severity
    what: str
    path: str
    offset: int

    def __str__(self) -> str:
        return f"{self.severity}: {self.path}, offset {self.offset}: {self.what}"


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment. Of a trimmed one `size_bytes` is what it had; the counts are of what was verified now.

    `end` of a damaged segment is where its good frames stop.
    """

    id: SegmentId
    state: State
    first: int
    end: int
    message_count: int
    batch_count: int
    size_bytes: int
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. `problems` are those of files that belong to no one segment."""

    path: str
    identity: Identity | None
    durable: DurableEnd | None
    segments: tuple[SegmentReport, ...]
    problems: tuple[Problem, ...]

    @property
    def all_problems(self) -> list[Problem]:
        """Of the directory, then of each segment."""
        return [*self.problems, *(problem for segment in self.segments for problem in segment.problems)]

    @property
    def is_damaged(self) -> bool:
        """Whether anything is wrong that must not be."""
        return bool(self.damage)

    @property
    def damage(self) -> list[Problem]:
        """What must not be."""
        return [problem for problem in self.all_problems if problem.severity is Severity.DAMAGE]

    @property
    def notes(self) -> list[Problem]:
        """What costs nobody a message."""
        return [problem for problem in self.all_problems if problem.severity is Severity.NOTE]
