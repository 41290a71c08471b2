"""Applies the last command of an epoch to the state.

Pure. A soft reset changes nothing but the record of resets. A hard reset drops everything merged and
everything that was waiting. Invariants:
- Positions, dedup ids, running checksums and instruction numbers continue, so none is used twice.
- After a hard or forced reset the next merged segment starts a run number (X) that was never used.

After a forced reset, other nodes may have merged more in the current segment than the node with which the
cluster continues. The run number shows them that their bytes are not part of this log.

After a forced reset, the tokens of leases are greater than all tokens of earlier generations. They also
differ from the tokens of a rival: a cluster that was forced elsewhere from the same generation, and knows no
lease of this cluster:

    generation, 8 bits | drawn at random for each forced reset, 24 bits | count of tokens, 31 bits
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from rt.cluster_epoch import epoch_of, generation_of
from rt.log.format.segment_table import TRIMMED_ENTRIES_MAX, TrimReason
from sequencer.state.apply_result import ClusterReset, Outcome
from sequencer.state.commands import ResetCluster
from sequencer.state.merge import seal_active, segment_after
from sequencer.state.state import (
    BEGIN,
    ClearedRange,
    End,
    ForcedQuorum,
    LastReset,
    MergedEnd,
    SequencerState,
    Session,
)

_LOT_BITS: Final = 24
"""Taken from the random id of the request: two rivals draw the same bits once in about 17 million times."""
_GIVEN_BITS: Final = 31
"""2,000 million leases can be granted until the tokens of a generation reach the tokens with other random
bits.
"""


def reset(state: SequencerState, command: ResetCluster) -> Outcome:
    """End the epoch. The next epoch, `command.epoch`, starts with the resulting state."""
    state.last_reset = LastReset(
        command.is_hard, command.epoch, command.at_ns, command.request, command.forced_by
    )
    if command.forced_by:
        state.force = ForcedQuorum(command.request, command.forced_by)
        _raise_run(state, command.epoch)
        # Nodes that are lost may have granted tokens that are not known here.
        state.lease_token = max(state.lease_token, _token_before(command))
    if command.is_hard:
        _drop(state, command)
    return ClusterReset(command.is_hard, command.epoch)


def run_starts(state: SequencerState) -> dict[int, int]:
    """By run number of the merged segments: the first position of the run, ascending. The last entry is for
    the run of the next segment, which may be empty. Runs whose segments were trimmed long ago are missing.
    """
    found = dict[int, int]()
    for sealed in state.segments:
        found.setdefault(sealed.id.run, sealed.first)
    active = state.merged.segment
    if active is not None:
        found.setdefault(active.run, state.merged.first)
    found.setdefault(segment_after(state, active).run, state.position)
    return found


def _token_before(command: ResetCluster) -> int:
    """The token before the first one that is granted after a forced reset."""
    lot = int.from_bytes(command.request[: _LOT_BITS // 8], "big")
    return (generation_of(epoch_of(command.epoch, 0)) << _LOT_BITS | lot) << _GIVEN_BITS


def _raise_run(state: SequencerState, run: int) -> None:
    if state.merged.segment is None and state.cleared is not None:
        state.cleared = state.cleared._replace(run=run)
    state.merged.next_run = run


def _drop(state: SequencerState, command: ResetCluster) -> None:
    merged = state.merged
    seal_active(state, state.sequenced_ns)
    for at, segment in enumerate(state.segments):
        if not segment.is_trimmed:
            state.segments[at] = segment.trimmed(TrimReason.RESET, max(command.at_ns, 1))
    while len(state.segments) > TRIMMED_ENTRIES_MAX:
        state.segments.popleft()
    state.merged = MergedEnd(first=state.position, chain=merged.chain, total_bytes=merged.total_bytes)
    state.cleared = ClearedRange(command.epoch, state.position, state.next_session_id, command.epoch)
    for session in state.sessions.values():
        if session.active_runs:
            state.put(_closed(session))


def _closed(session: Session) -> Session:
    """End every run at the offset up to which it is merged. The same session directory continues with its
    next run.
    """
    last, consumed = session.active_runs[-1], session.consumed
    number = session.done[1].number if session.done is not None else 0
    if consumed is not None:
        number = consumed.end.number
    end = consumed.end if consumed is not None and len(session.active_runs) == 1 else End(*BEGIN, number)
    return replace(session, active_runs=(), consumed=None, done=(last.run, end), fenced_end=last.run + 1)
