"""The lives of publishers in the state: opened, fenced, closed, and what is merged next of a session.

Pure. The law: an X is merged only behind every X before it, and an incarnation only behind the one that it
took over from; what was taken over from never comes back.

A run that ended before any byte of it was sent is opened *sealed*: with its end, and not fenced. No node
takes a byte behind that end, now or ever, so the run needs neither fence nor close. If its bytes never come,
it is fenced as any other run: then it has no end until it is closed.

    open: no fence, no end | sealed: no fence, an end | fenced: no end | closed: fenced, an end
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rt.names import dedup_owner, session_owner
from sequencer.state.apply_result import CommandRejected, Forgotten, Outcome, RunClosed, RunFenced, RunOpened
from sequencer.state.commands import (
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    OpenRun,
    OpenSealedRuns,
    SealedRun,
)
from sequencer.state.state import (
    BEGIN,
    DEDUP_IDS_MAX,
    LIVES_MAX,
    RUNS_PER_OWNER_MAX,
    RUNS_PER_SESSION,
    ActiveRun,
    End,
    SequencerState,
    Session,
)

FORGOTTEN: Final = "the session was closed long ago, and its record is gone"


def open_life(state: SequencerState, command: OpenRun) -> Outcome:
    """A publisher began: in a directory that is known, or in one that takes over from it."""
    newest = state.session_of(command.session)
    if newest is not None and newest.incarnation == command.incarnation:
        return _open_known(state, newest, command)
    if (command.session, command.incarnation) in state.by_incarnation:
        return CommandRejected("a newer incarnation of the session was opened", is_fenced=True)
    if state.is_forgotten(command.session, command.incarnation):
        return CommandRejected(FORGOTTEN, is_fenced=True)
    if command.newest != (0 if newest is None else newest.id):
        # It was on its way while another directory took over, which may be the newer one.
        return CommandRejected(f"another incarnation than session {command.newest} is the newest")
    why = _why_no_room(state, command.session)
    # One that takes over from another is let in: that one is closed, and this one waits for it.
    if why is not None and not (newest is not None and newest.lives and not waits(state, newest)):
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
    return _add_life(state, session, command)


def open_sealed_lives(state: SequencerState, command: OpenSealedRuns) -> Outcome:
    """A publisher brings runs whose ends are known.

    As many are opened as find room. Runs that are open or over are passed over: several nodes propose the
    same runs. A run that is open without its end stays so: bytes behind that end may be anywhere.
    """
    opened: Outcome | None = None
    refused: Outcome | None = None
    for run, one in zip(command.runs, command.opens, strict=True):
        before = state.session_of(command.session)
        found = open_life(state, one)
        if not isinstance(found, RunOpened):
            refused = refused or found
            if before is None or before.last_run < run.run or before.life_of(run.run) is not None:
                break  # Nothing is opened before what comes first.
            continue
        opened, session = found, state.sessions[found.session_id]
        if before is None or before.id != session.id or before.last_run < run.run:
            _seal(state, session, run)
    return opened or refused or CommandRejected("no runs")


def _seal(state: SequencerState, session: Session, run: SealedRun) -> None:
    """Give the run that was opened just now its end."""
    life = session.lives[-1]
    if run.end[:2] == BEGIN and waits(state, session):
        return  # It would be over at once, before its turn.
    state.put(advanced(session.with_life(replace(life, end=run.end))))


def _open_known(state: SequencerState, session: Session, command: OpenRun) -> Outcome:
    if session.dedup_id != command.dedup_id:
        return CommandRejected(f"the session's dedup id is {session.dedup_id}, not {command.dedup_id}")
    known = session.life_of(command.run)
    if known is not None:
        if known.run_id == command.run_id:
            return RunOpened(session.id, command.run)
        return CommandRejected(f"session number {command.run} is open with another life", is_fenced=True)
    if command.run <= session.last_run:
        why = f"session number {command.run} is over: {session.last_run} was opened"
        # Who brings what is merged already is late, as slow nodes are: its next start says where to go on.
        is_merged = session.done is not None and session.fenced_end <= command.run <= session.done[0]
        return CommandRejected(why, is_fenced=not is_merged)
    if len(session.lives) >= LIVES_MAX:
        return CommandRejected(f"{LIVES_MAX} lives of the session wait to be merged")
    owner = session_owner(session.name)
    if len(session.lives) >= RUNS_PER_SESSION and state.runs_of[owner] >= RUNS_PER_OWNER_MAX:
        return CommandRejected(f"{state.runs_of[owner]} lives of {owner} wait to be merged")
    full = None if session.lives else _why_no_room(state, session.name)
    if full is not None:
        return CommandRejected(full, is_full=True)
    return _add_life(state, session, command)


def _add_life(state: SequencerState, session: Session, command: OpenRun) -> Outcome:
    life = ActiveRun(command.run, command.run_id)
    state.put(replace(session, last_run=command.run, lives=(*session.lives, life)))
    return RunOpened(session.id, command.run)


def why_full(state: SequencerState, name: str, dedup_id: str | None) -> str | None:
    """Why a publisher cannot open a session of that name now; None if it may."""
    session = state.session_of(name)
    if session is not None and session.lives:
        return None  # It is open, or `open_life` decides whether another one takes over from it.
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
    """Why one more session of that name cannot be open; None if it can."""
    config, owner = state.configuration, session_owner(name)
    if state.open_of[owner] >= config.sessions_per_name_max:
        return f"{config.sessions_per_name_max} sessions of {owner} are open (sessionsPerNameMax)"
    if state.open_count >= config.sessions_max:
        return f"{config.sessions_max} sessions are open (sessionsMax)"
    return None


def close_session(state: SequencerState, command: CloseSession) -> Outcome:
    """An operator ends the run that is merged of a session: nothing more is taken of it.

    Runs after it are ended by the leader, unless their publisher is connected.
    """
    session = state.session_of(command.session)
    if session is None:
        return CommandRejected(f"there is no session {command.session}")
    if session.life is None:
        return CommandRejected(f"session {command.session} is closed")
    if not session.life.is_fenced:
        state.put(session.with_life(_fenced(session.life)))
    return RunFenced(session.id, session.life.run, is_given_up=True)


def forget_sessions(state: SequencerState, command: Forget) -> Outcome:
    """Drop the records of sessions that are closed."""
    gone = tuple(session_id for session_id in command.session_ids if session_id in state.closed)
    for session_id in gone:
        state.forget(session_id)
    return Forgotten(gone) if gone else CommandRejected("none of these sessions is closed")


def fence_life(state: SequencerState, command: FenceRun) -> Outcome:
    """Nothing more is taken of a life."""
    session = state.sessions.get(command.session_id)
    life = session.life_of(command.run) if session is not None else None
    if session is None or life is None:
        return CommandRejected(f"session {command.session_id} has no session number {command.run} to fence")
    state.put(session.with_life(_fenced(life)))
    return RunFenced(session.id, life.run)


def _fenced(life: ActiveRun) -> ActiveRun:
    """A sealed run loses its end: it is closed where nodes say that it ends."""
    return life if life.is_fenced else replace(life, is_fenced=True, end=None)


def close_life(state: SequencerState, command: CloseRun) -> Outcome:
    """A fenced life ends there."""
    session = state.sessions.get(command.session_id)
    life = session.life if session is not None else None
    if session is None or life is None or life.run != command.run:
        return CommandRejected(
            f"session number {command.run} of session {command.session_id} is not what is merged"
        )
    end = End(command.roll, command.offset, command.number)
    # An end that is lost everywhere is followed by a nearer one: see `sequencer.leader.session_close`.
    if not life.is_fenced or (life.end is not None and end[:2] >= life.end[:2]):
        return CommandRejected(
            f"session number {command.run} is {'closed' if life.is_fenced else 'not fenced'}"
        )
    if waits(state, session):
        return CommandRejected(f"an older incarnation, session {session.waits_for}, is not merged whole")
    if session.consumed is not None:
        done = session.consumed.end
        if end.number < done.number or end[:2] < done[:2]:
            return CommandRejected(f"session number {command.run} is merged beyond {end}, up to {done}")
        if end.number > done.number and end[:2] == done[:2]:
            return CommandRejected(f"session number {command.run} has no messages between {done} and {end}")
    state.put(advanced(session.with_life(replace(life, end=end))))
    return RunClosed(session.id, command.run, end)


def advanced(session: Session) -> Session:
    """Go on with the next life that is not whole: the present one is if all up to its end is merged."""
    while (life := session.life) is not None and life.end is not None:
        consumed = session.consumed
        is_whole = life.end[:2] == BEGIN if consumed is None else consumed.end.number == life.end.number
        if not is_whole:
            break
        session = replace(session, lives=session.lives[1:], consumed=None, done=(life.run, life.end))
    return session


def waits(state: SequencerState, session: Session) -> bool:
    """Whether an older incarnation of the name is not merged whole.

    To look at the one before is enough: as it had to wait in its turn, it ends after those before it.
    """
    older = state.sessions.get(session.waits_for)
    return older is not None and bool(older.lives)
