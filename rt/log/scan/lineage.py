"""Check the sources of a merged log: each block must continue its session where the last one ended.

Pure: the caller scans the log from its oldest block, and reports problems.

Invariants:
- Within one session segment, source ranges and their running checksums follow each other without gap or
  overlap. The first range of the next segment starts at the start of that segment. Run numbers only increase.
- Numbers are dense within a session's run, skipped messages included.
- In a dedup session, ranges whose messages came from another session may be left out.
- The merged numbers of a dedup id are dense across all its sessions.
"""

from __future__ import annotations

from msgspec import Struct

from rt.log.format.batch import BatchHeader
from rt.log.format.block import BlockHeader, Declaration
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId


class _SourceRange(Struct):
    """How far a session has been merged. `next_number` is None if unknown."""

    segment: SegmentId
    offset: int
    next_number: int | None
    chain: int


class SourceLineage:
    """How far each session is merged. Each method returns a problem as text, or None.

    After a problem it continues from the new block, so that a break is reported once.
    """

    def __init__(self) -> None:
        self._declared: dict[int, Declaration] = {}
        self._merged: dict[int, _SourceRange] = {}
        self._next_merged: dict[str, int] = {}
        self._current: _SourceRange | None = None
        self._is_first_batch = False
        self._may_jump = False
        self._block: BlockHeader | None = None

    def reset(self) -> None:
        """Start from scratch after a hole in the log."""
        self._merged.clear()
        self._next_merged.clear()

    def declare(self, session_id: int, declaration: Declaration) -> str | None:
        known = self._declared.setdefault(session_id, declaration)
        if known == declaration:
            return None
        self._declared[session_id] = declaration
        return f"session id {session_id} is declared as {declaration.session}, before as {known.session}"

    def enter(self, block: BlockHeader) -> str | None:
        segment = SegmentId(block.source_run, block.source_roll)
        last = self._merged.get(block.session_id)
        is_next = last is not None and (segment, block.source_offset) == (last.segment, last.offset)
        problem = None if last is None else self._break(last, segment, block)
        number = (
            last.next_number if last is not None and last.segment.run == segment.run and not problem else None
        )
        end = block.source_offset + block.length_bytes
        self._current = _SourceRange(segment, end, number, block.chain_end)
        self._merged[block.session_id] = self._current
        # If a block of a dedup session does not start exactly where the last one ended, ranges may have been
        # left out before it. This includes a block at the start of the next segment, because the end of the
        # last segment is not known here.
        self._may_jump = self._dedup_id(block) is not None and last is not None and not is_next
        self._is_first_batch = True
        self._block = block
        return problem

    def batch(self, header: BatchHeader) -> str | None:
        """Handle the next batch of the block entered last."""
        assert self._current is not None
        assert self._block is not None
        expected, self._current.next_number = self._current.next_number, header.end
        is_first, self._is_first_batch = self._is_first_batch, False
        if (
            expected is not None
            and header.first != expected
            and not (is_first and self._may_jump and header.first > expected)
        ):
            return f"number {header.first} of {self._name(self._block)} where {expected} must follow"
        return self._check_merged(self._block, header.first) if is_first else None

    def _check_merged(self, block: BlockHeader, first: int) -> str | None:
        dedup_id = self._dedup_id(block)
        if dedup_id is None:
            return None
        got = first + block.skip
        expected = self._next_merged.get(dedup_id, got)
        self._next_merged[dedup_id] = got + block.message_count
        return (
            None if got == expected else f"number {got} of dedup id {dedup_id} where {expected} must follow"
        )

    def _break(self, last: _SourceRange, segment: SegmentId, block: BlockHeader) -> str | None:
        """Why this range cannot follow the last one, or does not continue its bytes."""
        place, last_place = (segment, block.source_offset), (last.segment, last.offset)
        if place < last_place or (self._dedup_id(block) is None and not _follows(last, segment, block)):
            what = f"after {last.segment}, offset {last.offset}"
        elif place == last_place and block.chain_start != last.chain:
            what = f"with the chain {block.chain_start:#010x}, expected {last.chain:#010x}"
        else:
            return None
        return f"{self._name(block)} continues at {segment}, offset {block.source_offset}, {what}"

    def _dedup_id(self, block: BlockHeader) -> str | None:
        declared = self._declared.get(block.session_id)
        return None if declared is None else declared.dedup_id

    def _name(self, block: BlockHeader) -> str:
        declared = self._declared.get(block.session_id)
        return f"session {block.session_id}" if declared is None else f"session {declared.session}"


def _follows(last: _SourceRange, segment: SegmentId, block: BlockHeader) -> bool:
    """Whether the range starts where the last one ended, or at the start of the next segment."""
    if segment == last.segment:
        return block.source_offset == last.offset
    is_next = segment.run > last.segment.run and segment.roll == 0
    is_rolled = segment == SegmentId(last.segment.run, last.segment.roll + 1)
    return (is_next or is_rolled) and block.source_offset == SEGMENT_HEADER_BYTES
