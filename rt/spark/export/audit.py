"""The findings of an audit of replicas in each segment, and the check that the segments form one log. Pure.

Segments are checked separately and in parallel. Each segment is verified by itself (see
`rt.log.scan.lineage`). Then every two neighbours are verified at their common boundary. Together this proves
for the whole log:
- Positions are dense.
- Each session is merged in order, without gap or overlap.
- The numbers of a session, and of a dedup id across its sessions, are dense.

So no message is missing, duplicated, or out of its session's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field
from msgspec.structs import replace

from rt.log.format.batch import BatchHeader
from rt.log.format.block import BlockHeader, Declaration
from rt.log.format.segment import SegmentId
from rt.log.scan.lineage import SourceLineage


class BrokenSegment(Struct, frozen=True):
    """A problem, with its file and offset."""

    what: str
    path: str
    offset: int
    severity: str = "damage"
    """One of `rt.log.check.report.Severity`."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.path}, offset {self.offset}: {self.what}"


class DrawnRange(Struct, frozen=True):
    """A block of a session, and its first and last batch."""

    block: BlockHeader
    first: BatchHeader
    last: BatchHeader


class FoundSegment(Struct):
    """One segment, as found in its longest copy; `path` is that copy's file.

    `drawn`: by session id its first and its last block. `dedup`: by dedup id the first number, and one past
    the last number. `problems` has the problems of all copies. If `is_whole`, this copy has no problem.
    `bad_messages` are batches that no reader can decode, although all copies hold them as they were
    published.
    """

    segment: SegmentId
    path: str
    first: int
    end: int
    message_count: int = 0
    read_bytes: int = 0
    declared: dict[int, Declaration] = field(default_factory=dict)
    drawn: dict[int, tuple[DrawnRange, DrawnRange]] = field(default_factory=dict)
    dedup: dict[str, tuple[int, int]] = field(default_factory=dict)
    problems: list[BrokenSegment] = field(default_factory=list)
    bad_messages: list[BrokenSegment] = field(default_factory=list)
    is_whole: bool = True


class RecordingLineage(SourceLineage):
    """Checks the blocks within a segment, and records where each session starts and ends there."""

    def __init__(self, found: FoundSegment) -> None:
        super().__init__()
        self._found = found
        self._entered: BlockHeader | None = None
        self._is_new = False

    def declare(self, session_id: int, declaration: Declaration) -> str | None:
        self._found.declared[session_id] = declaration
        return super().declare(session_id, declaration)

    def enter(self, block: BlockHeader) -> str | None:
        self._entered, self._is_new = block, True
        return super().enter(block)

    def batch(self, header: BatchHeader) -> str | None:
        block, found = self._entered, self._found
        assert block is not None
        before = found.drawn.get(block.session_id)
        if self._is_new or before is None:
            now = DrawnRange(block, header, header)
            declared = found.declared.get(block.session_id)
            if declared is not None and declared.dedup_id is not None:
                start = header.first + block.skip
                known = found.dedup.get(declared.dedup_id, (start, start))
                found.dedup[declared.dedup_id] = (known[0], start + block.message_count)
        else:
            now = replace(before[1], last=header)
        self._is_new = False
        found.drawn[block.session_id] = (now if before is None else before[0], now)
        return super().batch(header)


def join(segments: Iterable[FoundSegment]) -> Iterator[BrokenSegment]:
    """The problems where segments meet. `segments` must be in order."""
    last: FoundSegment | None = None
    declared: dict[int, Declaration] = {}
    drawn: dict[int, DrawnRange] = {}
    dedup: dict[str, int] = {}
    for found in segments:
        if last is not None:
            if found.first != last.end:
                yield _problem(found, f"starts at {found.first} where {last.end} must follow")
                drawn, dedup = {}, {}
            for number, one in found.declared.items():
                if declared.get(number, one) != one:
                    what = f"session id {number} is declared as {one.session}, before as another one"
                    yield _problem(found, what)
            for number, (first, _) in sorted(found.drawn.items()):
                if number in drawn:
                    yield from _meeting(found, drawn[number], first)
            for dedup_id, (start, _) in sorted(found.dedup.items()):
                if dedup.get(dedup_id, start) != start:
                    what = f"number {start} of dedup id {dedup_id} where {dedup[dedup_id]} must follow"
                    yield _problem(found, what)
        declared.update(found.declared)
        last = found if found.is_whole else None
        if found.is_whole:
            drawn.update({number: ends[1] for number, ends in found.drawn.items()})
            dedup.update({dedup_id: ends[1] for dedup_id, ends in found.dedup.items()})
        else:
            drawn, dedup = {}, {}  # The end of this segment is unknown.


def _meeting(found: FoundSegment, last: DrawnRange, first: DrawnRange) -> Iterator[BrokenSegment]:
    """The problems of a session where it continues in a later segment."""
    number = first.block.session_id
    who = found.declared[number]
    sources = SourceLineage()
    if who.dedup_id is not None:
        who = replace(who, dedup_id="before")
    sources.declare(number, who)
    sources.enter(last.block)
    sources.batch(last.first)
    if last.last is not last.first:
        sources.batch(last.last)
    if who.dedup_id is not None:
        # Other sessions may lie between. Dedup numbers are checked separately.
        sources.declare(number, replace(who, dedup_id="now"))
    for what in (sources.enter(first.block), sources.batch(first.first)):
        if what is not None:
            yield _problem(found, what)


def _problem(found: FoundSegment, what: str) -> BrokenSegment:
    return BrokenSegment(what, found.path, 0)
