"""The runs of publishers in the state: how they are opened, fenced and closed, and which run of a session is
merged next.

Pure. Invariants:
- A run is merged only after all earlier runs, and an incarnation only after the one that it superseded.
- A superseded incarnation is never opened again.

A run that ended before any byte of it was sent is opened *sealed*: with its end, and not fenced. No node ever
accepts a byte after that end, so the run needs neither fence nor close. If its bytes never arrive, it is
fenced like any other run, and then has no end until it is closed.

    open: no fence, no end | sealed: no fence, an end | fenced: no end | closed: fenced, an end

A publisher may promise, for its run, to be silent for no longer than a limit. The promise ends when the
publisher says that it was closed in order, when a later run is opened, or when an operator closes the
session. All of these are committed facts, and not the memory of one node. So if a node was cut off when the
publisher was closed, it raises no false alarm later. If the publisher was killed, every node raises the
alarm. The end of a run shows neither: the run of a closed publisher stays open until it has a successor. A
promise that has ended is never made again in the same run, so a late command of another node cannot bring it
back.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from rt.names import dedup_owner, session_owner
from sequencer.state.apply_result import (
    CommandRejected,
    Forgotten,
    Outcome,
    RunClosed,
    RunFenced,
    RunOpened,
    SilenceLimited,
)
from sequencer.state.session_commands import (
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    LimitSilence,
    OpenRun,
    OpenSealedRuns,
    SealedRun,
)
from sequencer.state.state import (
    BEGIN,
    DEDUP_IDS_MAX,
    RUNS_MAX,
    RUNS_PER_OWNER_MAX,
    RUNS_PER_SESSION,
    ActiveRun,
    End,
    SequencerState,
    Session,
)

FORGOTTEN: Final = "the session was closed long ago, and its record is gone"


def open_run(state: SequencerState, command: OpenRun) -> Outcome:
    """Open a run in a known session directory, or in one that supersedes it."""
    newest = state.session_of(command.session)
    if newest is not None and newest.incarnation == command.incarnation:
        return _open_known(state, newest, command)
    if (command.session, command.incarnation) in state.by_incarnation:
        return CommandRejected("a newer incarnation of the session was opened", is_fenced=True)
    if (command.session, command.incarnation) in state.forgotten:
        return CommandRejected(FORGOTTEN, is_fenced=True)
    if command.newest != (0 if newest is None else newest.id):
        # Another directory, which may be the newer one, was opened after this command was proposed.
        return CommandRejected(f"another incarnation than session {command.newest} is the newest")
    why = _why_no_room(state, command.session)
    # A session that supersedes an open session is accepted: the open one is closed, and the new one waits for
    # it.
    if why is not None and not (newest is not None and newest.active_runs and not waits(state, newest)):
        return CommandRejected(why, is_full=True)
    why = _why_no_dedup_id(state, command.dedup_id)
    if why is not None:
        return CommandRejected(why, is_full=True)
    waits_for = 0
    if newest is not None:
        waits_for = newest.id
        state.put(replace(newest, is_superseded=True))
    session = Session(
        state.next_session_id, command.session, command.incarnation, command.dedup_id, waits_for=waits_for
    )
    state.next_session_id += 1
    return _add_run(state, session, command)


def open_sealed_runs(state: SequencerState, command: OpenSealedRuns) -> Outcome:
    """Open runs whose ends are known, as many as there is room for.

    Runs that are open or over are skipped, because several nodes propose the same runs. If a run is open
    without its end, it stays open without an end: nodes may hold bytes after that end.
    """
    opened: Outcome | None = None
    refused: Outcome | None = None
    for run, one in zip(command.runs, command.opens, strict=True):
        before = state.session_of(command.session)
        found = open_run(state, one)
        if not isinstance(found, RunOpened):
            refused = refused or found
            if before is None or before.last_run < run.run or before.run_of(run.run) is not None:
                break  # Runs are opened in order.
            continue
        opened, session = found, state.sessions[found.session_id]
        if before is None or before.id != session.id or before.last_run < run.run:
            _seal(state, session, run)
    return opened or refused or CommandRejected("no runs")


def _seal(state: SequencerState, session: Session, run: SealedRun) -> None:
    """Set the end of the run that was just opened."""
    active = session.active_runs[-1]
    if run.end[:2] == BEGIN and waits(state, session):
        return  # Otherwise the run would be over immediately, before its turn.
    state.put(advanced(session.with_run(replace(active, end=run.end))))


def _open_known(state: SequencerState, session: Session, command: OpenRun) -> Outcome:
    if session.dedup_id != command.dedup_id:
        return CommandRejected(f"the session's dedup id is {session.dedup_id}, not {command.dedup_id}")
    known = session.run_of(command.run)
    if known is not None:
        if known.run_id == command.run_id:
            return RunOpened(session.id, command.run)
        return CommandRejected(f"run {command.run} is open with another run id", is_fenced=True)
    if command.run <= session.last_run:
        why = f"run {command.run} is over: run {session.last_run} was opened"
        # A slow node may propose a run that is merged already. Its next start message contains the offset at
        # which to continue.
        is_merged = session.done is not None and session.fenced_end <= command.run <= session.done[0]
        return CommandRejected(why, is_fenced=not is_merged)
    if len(session.active_runs) >= RUNS_MAX:
        return CommandRejected(f"{RUNS_MAX} runs of the session wait to be merged")
    owner = session_owner(session.name)
    if len(session.active_runs) >= RUNS_PER_SESSION and state.runs_of[owner] >= RUNS_PER_OWNER_MAX:
        return CommandRejected(f"{state.runs_of[owner]} runs of {owner} wait to be merged")
    full = None if session.active_runs else _why_no_room(state, session.name)
    if full is not None:
        return CommandRejected(full, is_full=True)
    return _add_run(state, session, command)


def _add_run(state: SequencerState, session: Session, command: OpenRun) -> Outcome:
    active = ActiveRun(command.run, command.run_id)
    runs = (*session.active_runs, active)
    opened = replace(session, last_run=command.run, active_runs=runs)
    state.put(replace(opened, silence_ms_max=0, is_closed_in_order=False))
    return RunOpened(session.id, command.run)


def why_full(state: SequencerState, name: str, dedup_id: str | None) -> str | None:
    """Why a publisher cannot open a session of that name now; None if it may."""
    session = state.session_of(name)
    if session is not None and session.active_runs:
        return None  # It is open, or `open_run` decides whether another one supersedes it.
    return _why_no_room(state, name) or _why_no_dedup_id(state, dedup_id)


def _why_no_dedup_id(state: SequencerState, dedup_id: str | None) -> str | None:
    """Why a session cannot use that dedup id; None if it can."""
    if dedup_id is None or dedup_id in state.wanted or len(state.wanted) < DEDUP_IDS_MAX:
        return None
    owner = dedup_owner(dedup_id)
    if sum(dedup_owner(known) == owner for known in state.wanted) < DEDUP_IDS_MAX:
        return None
    return f"{DEDUP_IDS_MAX} dedup ids of {owner} were used, and {dedup_id} is one more"


def _why_no_room(state: SequencerState, name: str) -> str | None:
    """Why another session of that name cannot be opened; None if it can."""
    config, owner = state.configuration, session_owner(name)
    if state.open_of[owner] >= config.sessions_per_name_max:
        return f"{config.sessions_per_name_max} sessions of {owner} are open (sessionsPerNameMax)"
    if state.open_count >= config.sessions_max:
        return f"{config.sessions_max} sessions are open (sessionsMax)"
    return None


def close_session(state: SequencerState, command: CloseSession) -> Outcome:
    """Fence the run of a session that is being merged, on request of an operator.

    The leader ends the runs after it, unless their publisher is connected.
    """
    session = state.session_of(command.session)
    if session is None:
        return CommandRejected(f"there is no session {command.session}")
    if session.active is None and not session.silence_ms_max:
        return CommandRejected(f"session {command.session} is closed")
    if session.silence_ms_max:
        session = _promising_nothing(session)
        state.put(session)
    if session.active is None:
        # The cluster was still waiting for its publisher.
        return RunFenced(session.id, session.last_run, is_given_up=True)
    if not session.active.is_fenced:
        state.put(session.with_run(_fenced(session.active)))
    return RunFenced(session.id, session.active.run, is_given_up=True)


def limit_silence(state: SequencerState, command: LimitSilence) -> Outcome:
    session = state.sessions.get(command.session_id)
    if session is None or is_promise_settled(session, command.run, command.milliseconds):
        return CommandRejected(f"run {command.run} of session {command.session_id} promises nothing new")
    if session.last_run != command.run:
        return CommandRejected(f"run {command.run} of session {command.session_id} was not opened")
    if command.milliseconds:
        state.put(replace(session, silence_ms_max=command.milliseconds))
    else:
        state.put(_promising_nothing(session))
    return SilenceLimited(session.id)


def is_promise_settled(session: Session, run: int, silence_ms_max: int) -> bool:
    """Whether a promise of a run, or the end of the promise (0), is recorded, or can no longer be
    recorded.
    """
    if session.is_superseded or session.last_run != run:
        return session.is_superseded or session.last_run > run
    if session.is_closed_in_order or not silence_ms_max:
        return session.is_closed_in_order
    active = session.run_of(run)
    return bool(session.silence_ms_max) or active is None or active.is_fenced


def _promising_nothing(session: Session) -> Session:
    return replace(session, silence_ms_max=0, is_closed_in_order=True)


def forget_sessions(state: SequencerState, command: Forget) -> Outcome:
    gone = tuple(one for one in dict.fromkeys(command.session_ids) if one in state.closed)
    state.forget(gone)
    return Forgotten(gone) if gone else CommandRejected("none of these sessions is closed")


def fence_run(state: SequencerState, command: FenceRun) -> Outcome:
    """Fence the runs of the command that are open."""
    session = state.sessions.get(command.session_id)
    wanted = {command.run, *command.later}
    runs = [] if session is None else [one.run for one in session.active_runs if one.run in wanted]
    if session is None or not runs:
        return CommandRejected(f"session {command.session_id} has no run {command.run} to fence")
    fenced = (_fenced(one) if one.run in wanted else one for one in session.active_runs)
    state.put(replace(session, active_runs=tuple(fenced)))
    return RunFenced(session.id, runs[0], later=tuple(runs[1:]))


def _fenced(active: ActiveRun) -> ActiveRun:
    """Fence a run. A sealed run loses its end: it is closed at the end that nodes report."""
    return active if active.is_fenced else replace(active, is_fenced=True, end=None, announced=active.end)


def close_run(state: SequencerState, command: CloseRun) -> Outcome:
    """End a fenced run, and later runs of which no node has a byte."""
    session = state.sessions.get(command.session_id)
    active = session.active if session is not None else None
    if session is None or active is None or active.run != command.run:
        return CommandRejected(
            f"run {command.run} of session {command.session_id} is not the one that is being merged"
        )
    end = command.end
    # If all nodes lost the bytes at an end, it is replaced by an earlier end: see
    # `sequencer.leader.session_close`.
    if not active.is_fenced or (active.end is not None and end[:2] >= active.end[:2]):
        return CommandRejected(f"run {command.run} is {'closed' if active.is_fenced else 'not fenced'}")
    if waits(state, session):
        return CommandRejected(f"an older incarnation, session {session.waits_for}, is not merged completely")
    if session.consumed is not None:
        done = session.consumed.end
        if end.number < done.number or end[:2] < done[:2]:
            return CommandRejected(f"run {command.run} is merged beyond {end}, up to {done}")
        if end.number > done.number and end[:2] == done[:2]:
            return CommandRejected(f"run {command.run} has no messages between {done} and {end}")
    announced = max(filter(None, (active.announced, command.announced, active.end)), default=None)
    closed = {active.run: replace(active, end=end, announced=announced)}
    for one in session.active_runs[1:]:
        if one.run in command.later and one.is_fenced and one.end is None:
            closed[one.run] = replace(one, end=End(*BEGIN, 0))
    cut = tuple(run for run, one in closed.items() if _is_cut_short(one))
    # A run that was closed before may be counted already.
    count = len(cut) - (active.end is not None and _is_cut_short(active))
    runs = tuple(closed.get(one.run, one) for one in session.active_runs)
    total = session.runs_cut_short + count
    state.put(advanced(replace(session, active_runs=runs, runs_cut_short=total)))
    state.runs_cut_short += count
    return RunClosed(session.id, command.run, end, tuple(closed)[1:], cut)


def _is_cut_short(active: ActiveRun) -> bool:
    """Whether a closed run ends before the end that its publisher announced, or before its previous end."""
    return active.announced is not None and active.end is not None and active.end[:2] < active.announced[:2]


def advanced(session: Session) -> Session:
    """Continue with the next run that is not merged completely."""
    while (active := session.active) is not None and active.end is not None:
        consumed = session.consumed
        is_whole = active.end[:2] == BEGIN if consumed is None else consumed.end.number == active.end.number
        if not is_whole:
            break
        session = replace(
            session, active_runs=session.active_runs[1:], consumed=None, done=(active.run, active.end)
        )
    return session


def waits(state: SequencerState, session: Session) -> bool:
    """Whether an older incarnation of the name is not merged completely.

    It is enough to check the previous incarnation: it had to wait in the same way, so it ends after all
    incarnations before it.
    """
    older = state.sessions.get(session.waits_for)
    return older is not None and bool(older.active_runs)
