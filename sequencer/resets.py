"""What the last command of an epoch does to the state.

Pure. A soft reset changes nothing but the record of it. A hard one lets go of all that is merged and of all
that was to be. Its laws: positions, dedup ids, chains and numbers of instructions go on, so nothing that was
given out is given out again; what is merged from then on begins with a segment of an X that never was.

So it does behind a forced reset of either kind: others may have merged more in the present segment than the
node knows that the cluster goes on with, and by the X whoever has that finds out that it is not of this log.
"""

from __future__ import annotations

from dataclasses import replace

from rt.log.table import TRIMMED_ENTRIES_MAX, TrimReason
from sequencer.commands import Reset
from sequencer.outcomes import Outcome, WasReset
from sequencer.state import BEGIN, Cleared, End, Force, LastReset, MergedEnd, MergedSegment, Session, State


def reset(state: State, command: Reset) -> Outcome:
    """End the epoch. `command.epoch` begins, in which the state is as this leaves it."""
    state.last_reset = LastReset(
        command.is_hard, command.epoch, command.at_ns, command.request, command.forced_by
    )
    if command.forced_by:
        state.force = Force(command.request, command.forced_by)
        _raise_x(state, command.epoch)
        # Nodes that are lost may have given tokens that are not known here.
        state.lease_token = max(state.lease_token, command.epoch << 31)
    if command.is_hard:
        _let_go(state, command)
    return WasReset(command.is_hard, command.epoch)


def _raise_x(state: State, x: int) -> None:
    if state.merged.segment is None and state.cleared is not None:
        state.cleared = state.cleared._replace(x=x)
    state.merged.next_x = x


def _let_go(state: State, command: Reset) -> None:
    merged = state.merged
    if merged.segment is not None:
        sealed_ns = state.sequenced_ns
        state.segments.append(
            MergedSegment(
                merged.segment, merged.first, state.position, merged.offset, merged.created_ns, sealed_ns
            )
        )
    for at, segment in enumerate(state.segments):
        if not segment.is_trimmed:
            state.segments[at] = segment.trimmed(TrimReason.RESET, max(command.at_ns, 1))
    while len(state.segments) > TRIMMED_ENTRIES_MAX:
        state.segments.popleft()
    state.merged = MergedEnd(first=state.position, chain=merged.chain, total_bytes=merged.total_bytes)
    state.cleared = Cleared(command.epoch, state.position, state.next_session_id, command.epoch)
    for session in state.sessions.values():
        if session.lives:
            state.sessions[session.id] = _closed(session)


def _closed(session: Session) -> Session:
    """Every life ends where it is merged; the same directory goes on with its next X."""
    last, consumed = session.lives[-1], session.consumed
    number = session.done[1].number if session.done is not None else 0
    if consumed is not None:
        number = consumed.end.number
    end = consumed.end if consumed is not None and len(session.lives) == 1 else End(*BEGIN, number)
    return replace(session, lives=(), consumed=None, done=(last.x, end), fenced_end=last.x + 1)
