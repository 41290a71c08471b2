"""The lives of publishers in the state: opened, fenced, closed, and what is merged next of a session.

Pure. The law: an X is merged only behind every X before it, and an incarnation only behind the one that it
took over from; what was taken over from never comes back.
"""

from __future__ import annotations

from dataclasses import replace

from sequencer.commands import Close, Fence, Open
from sequencer.outcomes import Closed, Fenced, Opened, Outcome, Refused
from sequencer.state import BEGIN, LIVES_MAX, End, Life, Session, State


def open_life(state: State, command: Open) -> Outcome:
    """A publisher began: in a directory that is known, or in one that takes over from it."""
    newest = state.session_of(command.session)
    if newest is not None and newest.incarnation == command.incarnation:
        return _open_known(state, newest, command)
    if any(
        (one.name, one.incarnation) == (command.session, command.incarnation)
        for one in state.sessions.values()
    ):
        return Refused("a newer incarnation of the session was opened", is_fenced=True)
    if command.newest != (0 if newest is None else newest.id):
        # It was on its way while another directory took over, which may be the newer one.
        return Refused(f"another incarnation than session {command.newest} is the newest")
    waits_for = 0
    if newest is not None:
        waits_for = newest.id
        state.sessions[newest.id] = replace(newest, is_superseded=True)
    session = Session(
        state.next_session_id, command.session, command.incarnation, command.dedup_id, waits_for=waits_for
    )
    state.next_session_id += 1
    state.by_name[session.name] = session.id
    return _add_life(state, session, command)


def _open_known(state: State, session: Session, command: Open) -> Outcome:
    if session.dedup_id != command.dedup_id:
        return Refused(f"the session's dedup id is {session.dedup_id}, not {command.dedup_id}")
    known = session.life_of(command.x)
    if known is not None:
        if known.life == command.life:
            return Opened(session.id, command.x)
        return Refused(f"session number {command.x} is open with another life", is_fenced=True)
    if command.x <= session.last_x:
        why = f"session number {command.x} is over: {session.last_x} was opened"
        # Who brings what is merged already is late, as slow nodes are: its next start says where to go on.
        is_merged = session.done is not None and session.fenced_end <= command.x <= session.done[0]
        return Refused(why, is_fenced=not is_merged)
    if len(session.lives) >= LIVES_MAX:
        return Refused(f"{LIVES_MAX} lives of the session wait to be merged")
    return _add_life(state, session, command)


def _add_life(state: State, session: Session, command: Open) -> Outcome:
    life = Life(command.x, command.life)
    state.sessions[session.id] = replace(session, last_x=command.x, lives=(*session.lives, life))
    return Opened(session.id, command.x)


def fence_life(state: State, command: Fence) -> Outcome:
    """Nothing more is taken of a life."""
    session = state.sessions.get(command.session_id)
    life = session.life_of(command.x) if session is not None else None
    if session is None or life is None:
        return Refused(f"session {command.session_id} has no session number {command.x} to fence")
    state.sessions[session.id] = session.with_life(replace(life, is_fenced=True))
    return Fenced(session.id, life.x)


def close_life(state: State, command: Close) -> Outcome:
    """A fenced life ends there."""
    session = state.sessions.get(command.session_id)
    life = session.life if session is not None else None
    if session is None or life is None or life.x != command.x:
        return Refused(f"session number {command.x} of session {command.session_id} is not what is merged")
    end = End(command.y, command.offset, command.number)
    # An end that is lost everywhere is followed by a nearer one: see `sequencer.ends`.
    if not life.is_fenced or (life.end is not None and end[:2] >= life.end[:2]):
        return Refused(f"session number {command.x} is {'closed' if life.is_fenced else 'not fenced'}")
    if waits(state, session):
        return Refused(f"an older incarnation, session {session.waits_for}, is not merged whole")
    if session.consumed is not None:
        done = session.consumed.end
        if end.number < done.number or end[:2] < done[:2]:
            return Refused(f"session number {command.x} is merged beyond {end}, up to {done}")
        if end.number > done.number and end[:2] == done[:2]:
            return Refused(f"session number {command.x} has no messages between {done} and {end}")
    state.sessions[session.id] = advanced(session.with_life(replace(life, end=end)))
    return Closed(session.id, command.x, end)


def advanced(session: Session) -> Session:
    """Go on with the next life if the present one is closed and merged whole."""
    life = session.life
    if life is None or life.end is None:
        return session
    consumed = session.consumed
    is_whole = life.end[:2] == BEGIN if consumed is None else consumed.end.number == life.end.number
    if not is_whole:
        return session
    return replace(session, lives=session.lives[1:], consumed=None, done=(life.x, life.end))


def waits(state: State, session: Session) -> bool:
    """Whether an older incarnation of the name is not merged whole.

    To look at the one before is enough: as it had to wait in its turn, it ends after those before it.
    """
    return bool(session.waits_for) and bool(state.sessions[session.waits_for].lives)
