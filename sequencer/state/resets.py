"""What the last command of an epoch does to the state.

Pure. A soft reset changes nothing but the record of it. A hard one lets go of all that is merged and of all
that was to be. Its laws: positions, dedup ids, chains and numbers of instructions go on, so nothing that was
given out is given out again; what is merged from then on begins with a segment of an X that never was.

So it does behind a forced reset of either kind: others may have merged more in the present segment than the
node knows that the cluster goes on with, and by the X whoever has that finds out that it is not of this log.

Tokens of leases behind a forced reset are greater than all of earlier generations, and other ones than those
of a rival, which was forced elsewhere from the same generation and knows of no lease of this one:

    generation, 8 bits | drawn by lot for each force, 24 bits | tokens given, 31 bits
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rt.cluster_epoch import epoch_of, generation_of
from rt.log.format.segment_table import TRIMMED_ENTRIES_MAX, TrimReason
from sequencer.state.apply_result import ClusterReset, Outcome
from sequencer.state.commands import ResetCluster
from sequencer.state.state import (
    BEGIN,
    ClearedRange,
    End,
    ForcedQuorum,
    LastReset,
    MergedEnd,
    MergedSegment,
    SequencerState,
    Session,
)

_LOT_BITS: Final = 24
"""Of the request's id, which is random: two rivals get the same once in some 17 million times."""
_GIVEN_BITS: Final = 31
"""Two thousand million leases before a generation's tokens reach those of another lot."""


def reset(state: SequencerState, command: ResetCluster) -> Outcome:
    """End the epoch. `command.epoch` begins, in which the state is as this leaves it."""
    state.last_reset = LastReset(
        command.is_hard, command.epoch, command.at_ns, command.request, command.forced_by
    )
    if command.forced_by:
        state.force = ForcedQuorum(command.request, command.forced_by)
        _raise_run(state, command.epoch)
        # Nodes that are lost may have given tokens that are not known here.
        state.lease_token = max(state.lease_token, _token_before(command))
    if command.is_hard:
        _let_go(state, command)
    return ClusterReset(command.is_hard, command.epoch)


def _token_before(command: ResetCluster) -> int:
    """The token in front of the first one that is given behind a forced reset."""
    lot = int.from_bytes(command.request[: _LOT_BITS // 8], "big")
    return (generation_of(epoch_of(command.epoch, 0)) << _LOT_BITS | lot) << _GIVEN_BITS


def _raise_run(state: SequencerState, run: int) -> None:
    if state.merged.segment is None and state.cleared is not None:
        state.cleared = state.cleared._replace(run=run)
    state.merged.next_run = run


def _let_go(state: SequencerState, command: ResetCluster) -> None:
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
    state.cleared = ClearedRange(command.epoch, state.position, state.next_session_id, command.epoch)
    for session in state.sessions.values():
        if session.lives:
            state.put(_closed(session))


def _closed(session: Session) -> Session:
    """Every life ends where it is merged; the same directory goes on with its next X."""
    last, consumed = session.lives[-1], session.consumed
    number = session.done[1].number if session.done is not None else 0
    if consumed is not None:
        number = consumed.end.number
    end = consumed.end if consumed is not None and len(session.lives) == 1 else End(*BEGIN, number)
    return replace(session, lives=(), consumed=None, done=(last.run, end), fenced_end=last.run + 1)
