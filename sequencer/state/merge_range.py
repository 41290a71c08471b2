"""Decides what merging one range takes of it, given how far the session is merged.

Pure. Leaders plan with the rules of `apply`, so a plan is rejected only if another command came first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rt.log.format.segment import SEGMENT_HEADER_BYTES
from sequencer.state.commands import MergeRange
from sequencer.state.run_lifecycle import advanced, waits
from sequencer.state.state import BEGIN, ActiveRun, ConsumedEnd, End, SequencerState, Session


@dataclass(frozen=True, slots=True)
class ResolvedRange:
    """The part of a range that is merged: `count` messages after the first `skip`, and the session then."""

    one: MergeRange
    session: Session
    skip: int
    count: int
    wanted: int | None
    """The next id of the dedup session afterwards."""


def resolve_range(
    state: SequencerState, one: MergeRange, wanted: int | None, *, session: Session | None = None
) -> ResolvedRange | str:
    """Resolve a range, or say why it cannot be merged now. `wanted`: the next dedup id, if any.

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
