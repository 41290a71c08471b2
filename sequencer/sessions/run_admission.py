"""Decides which bytes of a publisher's runs a node accepts, from the state of the cluster. Pure.

Invariants:
- A run is accepted only if it is open, and everything before it in the session is merged, or complete in this
  node's replica.
- A directory that was superseded by another gets `rt.Fenced`.
- If a merged run may be another run than the publisher's own, the publisher does not learn that it is merged.
- If a publisher continues with a later run, it has no more bytes of an earlier run, even if it did not
  announce the end of that run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicator.protocol.handshake import NOWHERE, PushHello, PushProgress
from replicator.protocol.messages import LogOffset, Run, WholeRun
from replicator.receive.session_receiver import SessionReceiver
from rt.errors import Fenced, RtError, TooManySessions
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.names import session_owner
from rt.net.grpc_errors import Unreachable
from sequencer.sessions.merge_progress import consumed_place
from sequencer.state.apply_result import CommandRejected
from sequencer.state.run_lifecycle import FORGOTTEN
from sequencer.state.state import BEGIN, ActiveRun, End, SequencerState, Session


def session_of(state: SequencerState, hello: PushHello) -> Session | None:
    """The session of that directory; None before its first run is open. `rt.Fenced` if it was superseded."""
    session = state.session_of(hello.session)
    if session is not None and session.incarnation == hello.incarnation:
        return session
    got = f"incarnation {hello.incarnation.hex()}"
    if (hello.session, hello.incarnation) in state.by_incarnation:
        raise Fenced(
            "a newer directory of this session was opened",
            where=hello.session,
            got=got,
            hint="Two publishers use one session name, or an old directory was restored. Give each its own "
            f"name, for example {session_owner(hello.session)}~2, which the same certificate allows.",
        )
    if (hello.session, hello.incarnation) in state.forgotten:
        raise Fenced(
            FORGOTTEN,
            where=hello.session,
            got=got,
            hint="Start with a new directory. This one is rejected because it may be merged already.",
        )
    return None


def start_offset(
    state: SequencerState, session: Session | None, stored: LogOffset | None, *, is_released: bool
) -> LogOffset | None:
    """The offset at which the publisher must continue to send; None: from its oldest segment.

    `stored`: the end of this node's replica. `is_released`: this node does not need merged bytes any more.
    """
    if session is None:
        return stored
    place = consumed_place(session) if stored is None else stored
    if session.fenced_end and (place is None or place.run < session.fenced_end):
        place = LogOffset(session.fenced_end, 0, 0)
    if session.id in state.closed:
        # The session was closed without its publisher: no more bytes of its opened runs are accepted.
        return max(place or NOWHERE, LogOffset(session.last_run + 1, 0, 0))
    opened, done = session.active, session.done
    if place is None or opened is None or done is None or place.run > done[0]:
        return place
    # The last merged run may have been closed without its publisher. Then the publisher's disk has more bytes
    # than are accepted: continue with the next run if no bytes of the last run are needed.
    is_needed = place < end_offset(*done) and not is_released
    return place if is_needed else LogOffset(opened.run, 0, 0)


def is_welcome(
    session: Session, opened: Run, receiver: SessionReceiver | None, sealed: Mapping[int, ActiveRun]
) -> bool:
    """Whether bytes of the run are accepted: everything before it is merged, or complete here.

    `sealed`: runs that were opened with their end. The cluster may be done with them.
    """
    if session.done is not None and opened.number <= session.done[0]:
        known = sealed.get(opened.number)
        # Accept the bytes that this node is still missing.
        return session.done[0] == opened.number or (known is not None and known.run_id == opened.run_id)
    for before, one in zip((None, *session.active_runs), session.active_runs, strict=False):
        if (one.run, one.run_id) == (opened.number, opened.run_id):
            return before is None or (receiver is not None and _may_begin(receiver, opened.number, before))
        if one.end is None:
            return False
    return False


def may_be_another(session: Session, opened: Run, sealed: Mapping[int, ActiveRun]) -> bool:
    """Whether the cluster merged a run with this number, and that run may have another id.

    The state does not keep the ids of merged runs. If a directory was restored from a copy of itself, it
    gives the number to another run. This node notices that if it holds the merged run, and otherwise when it
    merges the bytes.
    """
    if session.done is None or opened.number > session.done[0]:
        return False
    known = sealed.get(opened.number)
    return known is None or known.run_id != opened.run_id


def without_merged(progress: PushProgress) -> PushProgress:
    """The durable part of the progress. The publisher learns the merged part with its next run, because the
    id of that run is compared.
    """
    return PushProgress(progress.durable, progress.durable_number)


def skipped_run(session: Session, later: Run) -> tuple[int, End] | None:
    """The active run and its end, if the publisher continues with a later run instead.

    A publisher deletes a run when all of it is merged. If a node is missing the last segment of that run, the
    publisher sends it only the bytes after the run, and this node may be the only one that it reaches.
    """
    active = session.active
    if active is None or active.run >= later.number or active.is_fenced or active.end is not None:
        return None
    return active.run, session.consumed.end if session.consumed is not None else End(*BEGIN, 0)


def _may_begin(receiver: SessionReceiver, run: int, before: ActiveRun) -> bool:
    """Whether a replica holds some of the run, or ends where the closed run before it ends."""
    place, end = receiver.next_offset, before.end
    if place is not None and place.run == run:
        return True
    return end is not None and receiver.has_ended and place == (before.run, end.roll, end.offset)


def run_end(state: SequencerState, session_id: int, run: int, sealed: ActiveRun | None = None) -> End | None:
    """The end after which a run's bytes are rejected; None if there is none.

    `sealed`: the run, if it was opened with its end. The cluster may be done with it. `rt.Unreachable`, with
    the reason, if the run accepts no more bytes.
    """
    session = state.sessions.get(session_id)
    if session is None:
        raise Unreachable("that session was closed", got=f"session {session_id}", hint="Reconnect.")
    opened = session.run_of(run)
    if opened is not None and opened.end is None and opened.is_fenced:
        raise Unreachable("that run is being closed", where=session.name, hint="Try again.")
    if opened is not None:
        return opened.end
    if session.done is not None and session.done[0] == run:
        return session.done[1]
    if sealed is not None and run >= session.fenced_end:
        return sealed.end
    raise Unreachable("that run is over", where=session.name, got=f"run {run}", hint="Reconnect.")


def sealed_count(
    state: SequencerState, session_id: int, runs: Sequence[WholeRun], known: Mapping[int, ActiveRun]
) -> int:
    """The number of these runs, counted from the first one, that are sealed now with exactly their end.

    `known`: runs that were sealed. The cluster may be done with them.
    """
    session = state.sessions.get(session_id)
    if session is None:
        return 0
    active_runs = {**known, **{opened.run: opened for opened in session.active_runs}}
    for count, run in enumerate(runs):
        sealed = ActiveRun(run.run.number, run.run.run_id, end=End(0, len(run.data), run.end))
        if run.run.number < session.fenced_end or active_runs.get(run.run.number) != sealed:
            return count
    return len(runs)


def end_offset(run: int, end: End) -> LogOffset:
    """The end of a run, as an offset: not before the bytes of its segment's header."""
    return LogOffset(run, end.roll, max(end.offset, SEGMENT_HEADER_BYTES))


def beyond_end(got: LogOffset, end: LogOffset, session: str) -> RtError:
    return Unreachable(
        "bytes after the end of a run that was closed",
        where=session,
        got=got,
        expected=f"at most {end}",
        hint="Reconnect: the node replies where the session continues.",
    )


def rejection(rejected: CommandRejected, hello: PushHello, opened: Run) -> RtError:
    if rejected.is_full:
        return TooManySessions(
            "too many sessions are open",
            where=hello.session,
            got=rejected.why,
            hint="An operator closes sessions by POST /close-session, or raises the limit by POST "
            "/configuration. The number of dedup ids is fixed: use known ones.",
        )
    kind = Fenced if rejected.is_fenced else Unreachable
    return kind(
        f"the cluster rejected that run: {rejected.why}", where=f"{hello.session}, run {opened.number}"
    )
