"""What merging one range takes of it, where a session now is.

Pure. Leaders plan by what `apply` decides by: what was planned is refused only if something else came before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rt.log.format.segment import SEGMENT_HEADER_BYTES
from sequencer.state.commands import MergeRange
from sequencer.state.run_lifecycle import advanced, waits
from sequencer.state.state import BEGIN, ActiveRun, ConsumedEnd, End, SequencerState, Session


@dataclass(frozen=True, slots=True)
class ResolvedRange:
    """What merging a range takes of it: `count` messages, behind the first `skip`. `session` afterwards."""

    one: MergeRange
    session: Session
    skip: int
    count: int
    wanted: int | None
    """The dedup session's next id afterwards."""


def take(
    state: SequencerState, one: MergeRange, wanted: int | None, *, session: Session | None = None
) -> ResolvedRange | str:
    """What a range comes to; or why it cannot be merged now. `wanted`: the dedup id's watermark, if any.

    `session` stands in for the state's, where a leader looks ahead.
    """
    if session is None:
        session = state.sessions.get(one.session_id)
    if session is None or session.life is None:
        return f"session {one.session_id} has nothing open"
    why = _misplaced(state, session, session.life, one)
    if why is not None:
        return f"session {session.id}: {why}"
    skip = 0
    if session.dedup_id is not None:
        wanted = one.first if wanted is None else wanted
        if one.first > wanted:
            return f"session {session.id}: dedup id {one.first} where {wanted} is wanted"
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


def _misplaced(state: SequencerState, session: Session, life: ActiveRun, one: MergeRange) -> str | None:
    if waits(state, session):
        return f"an older incarnation, session {session.waits_for}, is not merged whole"
    if one.run != life.run:
        return f"session number {one.run} where {life.run} is merged"
    consumed = session.consumed
    if consumed is None:
        if (one.roll, one.start) != BEGIN:
            return f"offset {one.start} of segment {one.roll} where session number {one.run} must begin"
    else:
        done = consumed.end
        is_next = (one.roll, one.start, one.chain_start) == (done.roll, done.offset, consumed.chain)
        is_next_segment = (one.roll, one.start) == (done.roll + 1, SEGMENT_HEADER_BYTES)
        if not (is_next or is_next_segment) or one.first != done.number:
            return f"a range from {one.roll}.{one.start}, number {one.first}, where {done} must follow"
    if life.end is not None and (one.end_number > life.end.number or (one.roll, one.end) > life.end[:2]):
        return f"a range up to {one.end_number} beyond the end {life.end}"
    return None
