"""What an audit of replicas finds in each segment, and whether the segments make one log.

Pure. Segments are looked at apart, each by whoever has time for it. Law: what is true within each segment (as
`rt.log.sources` and the frames say), and where each two meet, is true of the whole: positions are dense; each
session is drawn from in its order, without gap or overlap; its numbers, and those of a dedup id over all of
its sessions, are dense. So no message is missing, there twice, or out of its session's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rt.log.batch import BatchHeader
from rt.log.block import BlockHeader, Declaration
from rt.log.segment import SegmentId
from rt.log.sources import Sources


@dataclass(frozen=True, slots=True)
class Broken:
    """What is wrong, and where in which file."""

    what: str
    path: str
    offset: int

    def __str__(self) -> str:
        return f"damage: {self.path}, offset {self.offset}: {self.what}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A block of a session, and its first and last batch."""

    block: BlockHeader
    first: BatchHeader
    last: BatchHeader


@dataclass(slots=True)
class Found:
    """One segment, as it was found in its longest copy; `path` is that copy's file.

    `drawn`: by session id its first and its last block. `dedup`: by dedup id the first number and the one
    past the last. `problems` are of all copies; with `is_whole` none is of this one.
    """

    segment: SegmentId
    path: str
    first: int
    end: int
    message_count: int = 0
    read_bytes: int = 0
    declared: dict[int, Declaration] = field(default_factory=dict)
    drawn: dict[int, tuple[Drawn, Drawn]] = field(default_factory=dict)
    dedup: dict[str, tuple[int, int]] = field(default_factory=dict)
    problems: list[Broken] = field(default_factory=list)
    is_whole: bool = True


class NotingSources(Sources):
    """Checks what is drawn within a segment, and notes with what each session begins and ends there."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self._found = found
        self._entered: BlockHeader | None = None
        self._is_new = False

    def declare(self, session_id: int, declaration: Declaration) -> str | None:
        """See the base class."""
        self._found.declared[session_id] = declaration
        return super().declare(session_id, declaration)

    def enter(self, block: BlockHeader) -> str | None:
        """See the base class."""
        self._entered, self._is_new = block, True
        return super().enter(block)

    def batch(self, header: BatchHeader) -> str | None:
        """See the base class."""
        block, found = self._entered, self._found
        assert block is not None
        before = found.drawn.get(block.session_id)
        if self._is_new or before is None:
            now = Drawn(block, header, header)
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


def join(segments: Iterable[Found]) -> Iterator[Broken]:
    """What is wrong where segments meet; `segments` in their order."""
    last: Found | None = None
    declared: dict[int, Declaration] = {}
    drawn: dict[int, Drawn] = {}
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
            drawn, dedup = {}, {}  # How far it goes is not known.


def _meeting(found: Found, last: Drawn, first: Drawn) -> Iterator[Broken]:
    """What is wrong with a session where it is drawn from again."""
    number = first.block.session_id
    who = found.declared[number]
    sources = Sources()
    if who.dedup_id is not None:
        who = replace(who, dedup_id="before")
    sources.declare(number, who)
    sources.enter(last.block)
    sources.batch(last.first)
    if last.last is not last.first:
        sources.batch(last.last)
    if who.dedup_id is not None:
        # Other sessions may have come between: the numbers of a dedup id are followed by themselves.
        sources.declare(number, replace(who, dedup_id="now"))
    for what in (sources.enter(first.block), sources.batch(first.first)):
        if what is not None:
            yield _problem(found, what)


def _problem(found: Found, what: str) -> Broken:
    return Broken(what, found.path, 0)
