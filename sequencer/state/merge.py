"""Applies merge instructions to the state, and makes the write plans that place each byte.

Pure. Leaders plan with the rules of `apply`, so a plan is rejected only if another command came first.
Invariant: the headers of a plan, and the ends of segments, follow from the state and the command alone,
so that all nodes write the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from rt.log.format.block import BLOCK_HEADER_BYTES, BlockHeader, BlockKind, Declaration, encode_block_header
from rt.log.format.block import encode_declaration as encode_declaration_block
from rt.log.format.checksum import batch_seed, crc32c, segment_seed
from rt.log.format.constants import VERSION
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from sequencer.state.apply_result import CommandRejected, Outcome, RangesMerged
from sequencer.state.commands import MergeInstruction, MergeRange, Roll
from sequencer.state.run_lifecycle import advanced, waits
from sequencer.state.state import (
    BEGIN,
    ActiveRun,
    ConsumedEnd,
    End,
    MergedEnd,
    MergedSegment,
    SequencerState,
    Session,
)
from sequencer.state.write_plan import BlockWrite, SessionEnd, WritePlan


class ResolvedRange(Struct, frozen=True):
    """The part of a range that is merged: `count` messages after the first `skip`, and the session
    afterwards.
    """

    one: MergeRange
    session: Session
    skip: int
    count: int
    wanted: int | None
    """The next id of the dedup session afterwards."""


def resolve_range(
    state: SequencerState, one: MergeRange, wanted: int | None, *, session: Session | None = None
) -> ResolvedRange | str:
    """Resolve a range, or return why it cannot be merged now. `wanted`: the next dedup id, if any.

    `session` replaces the state's session when a leader plans ahead.
    """
    if session is None:
        session = state.sessions.get(one.session_id)
    if session is None or session.active is None:
        return f"session {one.session_id} has nothing open"
    why = _why_out_of_place(state, session, session.active, one)
    if why is not None:
        return f"session {session.id}: {why}"
    skip = 0
    if session.dedup_id is not None:
        wanted = one.first if wanted is None else wanted
        if one.first > wanted:
            return f"session {session.id}: dedup id {one.first} where {wanted} is expected"
        skip = min(wanted - one.first, one.count)
        wanted = max(wanted, one.end_number)
    end = End(one.roll, one.end, one.end_number)
    return ResolvedRange(
        one,
        advanced(replace(session, consumed=ConsumedEnd(end, one.chain_end))),
        skip,
        one.count - skip,
        wanted if session.dedup_id is not None else None,
    )


def _why_out_of_place(
    state: SequencerState, session: Session, active: ActiveRun, one: MergeRange
) -> str | None:
    if waits(state, session):
        return f"an older incarnation, session {session.waits_for}, is not merged completely"
    if one.run != active.run:
        return f"run {one.run} where run {active.run} is merged"
    consumed = session.consumed
    if consumed is None:
        if (one.roll, one.start) != BEGIN:
            return f"offset {one.start} of segment {one.roll} where run {one.run} must start"
    else:
        done = consumed.end
        is_next = (one.roll, one.start, one.chain_start) == (done.roll, done.offset, consumed.chain)
        is_next_segment = (one.roll, one.start) == (done.roll + 1, SEGMENT_HEADER_BYTES)
        if not (is_next or is_next_segment) or one.first != done.number:
            return f"a range from {one.roll}.{one.start}, number {one.first}, where {done} must follow"
    if active.end is not None and (
        one.end_number > active.end.number or (one.roll, one.end) > active.end[:2]
    ):
        return f"a range up to {one.end_number} beyond the end {active.end}"
    return None


def merge(state: SequencerState, command: MergeInstruction) -> Outcome:
    """Merge all ranges of an instruction, or none of them."""
    if (why := _does_not_follow(state, command)) is not None:
        return CommandRejected(why)
    taken: list[ResolvedRange] = []
    wanted = dict[str, int]()
    session: Session | None = None
    for one in command.ranges:
        if session is None or session.id != one.session_id:
            session = state.sessions.get(one.session_id)
        dedup_id = session.dedup_id if session is not None else None
        known = None if dedup_id is None else wanted.get(dedup_id, state.wanted.get(dedup_id))
        result = resolve_range(state, one, known, session=session)
        if isinstance(result, str):
            return CommandRejected(result)
        if dedup_id is not None and result.wanted is not None:
            wanted[dedup_id] = result.wanted
        taken.append(result)
        session = result.session
    state.instruction, state.sequenced_ns = command.number, command.sequenced_ns
    state.wanted.update(wanted)
    writes = any(result.count for result in taken)
    plan = _plan(state, command, taken, begins=writes and (state.merged.segment is None or _is_full(state)))
    for session in {result.session.id: result.session for result in taken}.values():
        state.put(session)
    return RangesMerged(plan)


def roll(state: SequencerState, command: Roll) -> Outcome:
    """Seal the active merged segment and start the next one, which is empty."""
    if (why := _does_not_follow(state, command)) is not None:
        return CommandRejected(why)
    merged = state.merged
    if merged.segment != (command.run, command.roll) or merged.offset <= SEGMENT_HEADER_BYTES:
        return CommandRejected(
            f"log.{command.run}.{command.roll} is not the active merged segment, or is empty"
        )
    state.instruction, state.sequenced_ns = command.number, command.sequenced_ns
    return RangesMerged(_plan(state, command, [], begins=True))


def _does_not_follow(state: SequencerState, command: MergeInstruction | Roll) -> str | None:
    if command.number != state.instruction + 1:
        return f"instruction {command.number} where {state.instruction + 1} must follow"
    if command.sequenced_ns <= state.sequenced_ns:
        return f"instruction {command.number} is not later than the one before"
    return None


def _plan(
    state: SequencerState, command: MergeInstruction | Roll, taken: list[ResolvedRange], *, begins: bool
) -> WritePlan:
    first_position = state.position
    if begins:
        _begin_segment(state, command.sequenced_ns)
    merged = state.merged
    offset = 0 if begins or merged.segment is None else merged.offset
    blocks = tuple(_blocks(state, command, taken))
    end_offset = merged.offset if merged.segment is not None else 0
    return WritePlan(
        command.number,
        command.sequenced_ns,
        merged.segment or segment_after(state, None),
        offset,
        first_position,
        state.position,
        blocks,
        merged.chain,
        merged.total_bytes,
        end_offset,
        tuple(
            SessionEnd(one.session_id, one.run, one.roll, one.end, one.end_number)
            for one in {result.one.session_id: result.one for result in taken}.values()
        ),
    )


def _is_full(state: SequencerState) -> bool:
    """Whether the active segment is full, or a reset makes the log continue in another one."""
    merged = state.merged
    if merged.segment is not None and merged.next_run > merged.segment.run:
        return True
    return SEGMENT_HEADER_BYTES < merged.offset >= state.configuration.roll_bytes


def _begin_segment(state: SequencerState, sequenced_ns: int) -> None:
    merged, last = state.merged, state.merged.segment
    seal_active(state, sequenced_ns)
    state.merged = MergedEnd(
        segment=segment_after(state, last),
        first=state.position,
        created_ns=sequenced_ns,
        chain=merged.chain,
        total_bytes=merged.total_bytes + SEGMENT_HEADER_BYTES,
    )


def seal_active(state: SequencerState, sealed_ns: int) -> None:
    """Add the active merged segment, if there is one, to the sealed ones."""
    merged = state.merged
    if merged.segment is not None:
        state.segments.append(
            MergedSegment(
                merged.segment, merged.first, state.position, merged.offset, merged.created_ns, sealed_ns
            )
        )


def segment_after(state: SequencerState, last: SegmentId | None) -> SegmentId:
    """The merged segment after the active one, `last`: hard and forced resets raise its run number."""
    if last is None:
        return SegmentId(state.merged.next_run if state.cleared is None else state.cleared.run, 0)
    next_run = state.merged.next_run
    return SegmentId(next_run, 0) if next_run > last.run else SegmentId(last.run, last.roll + 1)


def _blocks(
    state: SequencerState, command: MergeInstruction | Roll, taken: list[ResolvedRange]
) -> Iterator[BlockWrite]:
    merged = state.merged
    assert merged.segment is not None or not any(result.count for result in taken)
    seed = segment_seed(state.cluster, *merged.segment) if merged.segment is not None else 0
    index = 0
    for result in taken:
        if not result.count:
            continue
        one, session = result.one, result.session
        header = BlockHeader(
            version=VERSION,
            kind=BlockKind.BATCHES,
            instruction_index=index,
            instruction=command.number,
            session_id=session.id,
            source_run=one.run,
            source_roll=one.roll,
            skip=result.skip,
            source_offset=one.start,
            length_bytes=one.end - one.start,
            first_position=state.position,
            message_count=result.count,
            sequenced_ns=command.sequenced_ns,
            chain_start=one.chain_start,
            chain_end=one.chain_end,
        )
        if session.id not in merged.declared:
            merged.declared.add(session.id)
            who = Declaration(session.name, session.incarnation, session.dedup_id)
            head = encode_declaration_block(header, who, batch_seed(seed, merged.offset))
            yield _written(merged, BlockWrite(head, is_declaration=True))
            index += 1
            header = header._replace(instruction_index=index)
        head = encode_block_header(header, batch_seed(seed, merged.offset))
        assert len(head) == BLOCK_HEADER_BYTES
        yield _written(
            merged,
            BlockWrite(
                head,
                session_id=session.id,
                run=one.run,
                roll=one.roll,
                start=one.start,
                end=one.end,
                chain_end=one.chain_end,
                message_count=result.count,
            ),
        )
        index += 1
        state.position += result.count


def _written(merged: MergedEnd, block: BlockWrite) -> BlockWrite:
    merged.offset += block.size_bytes
    merged.total_bytes += block.size_bytes
    merged.chain = crc32c(block.head, merged.chain)
    return block
