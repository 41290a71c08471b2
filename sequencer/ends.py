"""Which lives of publishers the leader ends, and where: fences and closes.

Pure. A life that has a successor is fenced on all nodes; then each reports the final end of what it holds,
and the furthest of enough of them is where the life ends. The law: nothing that was acknowledged as
replicated is behind that end.

Why it holds: what was acknowledged up to an end `e` was durable on a majority. Any other majority has a node
of that one, which reports at least `e`, unless its disk was lost since. So a node whose disk took the place
of another while lives were open has no say (its disk is not *whole*) until it has again what the other one
might have told. Then, at any time, every majority of nodes with whole disks has one that holds `e`, or `e` is
merged:

- When `e` is acknowledged, a majority holds it, and every majority of whole disks meets that one.
- A disk that is lost is replaced by one that is not whole; what is left of the majorities is as before.
- A disk is restored when, for each life, it holds all that a majority of whole disks held after it had joined
  (or that is merged, or up to where the life was closed since). What the lost disk had acknowledged was
  acknowledged before that; so one of that majority held `e`, and now the restored disk does. What was
  acknowledged later, the new disk was there for.

Where all nodes have their say, whole or not, nobody is left who may know more, so that is enough as well; and
so it is, to restore a disk, if it holds all that all others held.

What only one node held of a closed life may be lost with its disk before others have copied it. It was not
acknowledged then, for no majority held it; so once all nodes have said what they hold, and no sender has
more, the life is closed anew at the furthest end that is left: else nothing behind it would ever be merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sequencer.board import Board, SegmentKey
from sequencer.commands import Close, Fence, Restore
from sequencer.lives import waits
from sequencer.orders import SessionEnd
from sequencer.outcomes import Closed, Fenced, Joined, Merged, Opened, Outcome, Restored
from sequencer.state import BEGIN, End, Session, State


def are_enough(state: State, board: Board, nodes: Collection[str]) -> bool:
    """Whether nobody else can know of more than these nodes do, of what was acknowledged as replicated."""
    if len(nodes) >= board.members:
        return True
    whole = sum(node in state.disks and state.disks[node].is_whole for node in nodes)
    return whole >= board.majority


class Endings:
    """The lives that are to end, looked at again when something is new that their ends depend on."""

    def __init__(self, state: State, board: Board) -> None:
        self._state, self._board = state, board
        self.due = set(state.sessions)
        """The sessions that are looked at next."""
        self._closed = {
            session.id
            for session in state.sessions.values()
            if session.life is not None and session.life.end is not None
        }
        """Those whose life is closed, and not merged whole."""

    def on_news(self, session_ids: Iterable[int]) -> None:
        """Nodes told more of these sessions."""
        self.due.update(session_id for session_id in session_ids if self._is_ending(session_id))

    def on_applied(self, outcome: Outcome) -> None:
        """Take note of the sessions that a command may have brought nearer to an end."""
        match outcome:
            case Opened(session_id):
                self.due |= {session_id, self._state.sessions[session_id].waits_for} - {0}
            case Closed(session_id):
                self.due.add(session_id)
                self._closed.add(session_id)
            case Fenced(session_id):
                self.due.add(session_id)
            case Merged(order):
                self.due.update(end.session_id for end in order.consumed if self._is_ending(end.session_id))
            case Joined() | Restored():
                self.due.update(self._state.sessions)

    def plan(self) -> list[Fence | Close]:
        """What can be proposed now, again and again until it is applied; each session's one by one."""
        commands: list[Fence | Close] = []
        for session_id in list(self.due):
            command = self._look(session_id)
            if isinstance(command, Fence | Close):
                commands.append(command)
            elif not command:
                self.due.discard(session_id)
        return commands

    def plan_lost(self, told: Mapping[str, int]) -> list[Close]:
        """Nearer ends of the lives whose end no node can reach; `told` as for `Restoring.plan`."""
        if len(told) < self._board.members or min(told.values()) < self._state.joins:
            return []
        return [
            close for session_id in list(self._closed) if (close := self._nearer_end(session_id)) is not None
        ]

    def _nearer_end(self, session_id: int) -> Close | None:
        session, board = self._state.sessions[session_id], self._board
        life = session.life
        if life is None or life.end is None:
            self._closed.discard(session_id)
            return None
        left = session.consumed.end if session.consumed is not None else End(*BEGIN, 0)
        for y, offset in board.tops(session_id, life.x):
            number = board.number_at(SegmentKey(session_id, life.x, y), offset)
            if number is not None and (y, offset) > left[:2]:
                left = End(y, offset, number)
        announced = board.announced(session_id, life.x)
        if not session.is_superseded and (announced is None or (announced.y, announced.offset) > left[:2]):
            return None  # A sender has it yet.
        return Close(session_id, life.x, *left) if left[:2] < life.end[:2] else None

    def _is_ending(self, session_id: int) -> bool:
        session = self._state.sessions.get(session_id)
        return session is not None and (session.is_superseded or len(session.lives) > 1)

    def _look(self, session_id: int) -> Fence | Close | bool:
        """The command that a session needs; or whether it only waits for an older incarnation."""
        state, board = self._state, self._board
        session = state.sessions.get(session_id)
        life = session.life if session is not None else None
        if session is None or life is None or life.end is not None or session.id in board.disagreements:
            return False
        if not self._is_ending(session_id):
            return False
        if not life.is_fenced:
            return _may_be_fenced(session, life.x, board) and Fence(session.id, life.x)
        finals = board.finals(session.id, life.x)
        if not are_enough(state, board, finals):
            return False
        if waits(state, session):
            return True
        # A node that was built anew, or trimmed its copy, holds less than what is merged.
        merged = [session.consumed.end] if session.consumed is not None else []
        return Close(session.id, life.x, *max(merged + [End(*final[2:]) for final in finals.values()]))


def _may_be_fenced(session: Session, x: int, board: Board) -> bool:
    """Whether a majority has all that the sender still had of it, or no sender will come.

    A life whose sender may still come is not fenced before a majority has all that the sender says it has:
    what it keeps on its own disk is not given up, however long it is cut off.
    """
    if session.is_superseded:
        return True
    announced = board.announced(session.id, x)
    return announced is not None and _has(session, board, announced)


def _has(session: Session, board: Board, end: SessionEnd) -> bool:
    if session.consumed is not None and session.consumed.end.number >= end.number:
        return True
    if (end.y, end.offset) == BEGIN:
        return True
    return board.mark_at(SegmentKey(end.session_id, end.x, end.y), end.offset) is not None


class Restoring:
    """Watches how disks that are not whole get what the ones before them had."""

    def __init__(self, state: State, board: Board) -> None:
        self._state, self._board = state, board
        self._wanted: dict[bytes, dict[tuple[int, int], tuple[int, int]]] = {}
        """By disk: where, of each life, it must have come to."""

    def plan(self, told: Mapping[str, int]) -> list[Restore]:
        """The disks that are whole again.

        `told`: how many disks had joined when each node last held nothing that is not on the board by now.
        """
        state = self._state
        broken = [(node, disk) for node, disk in state.disks.items() if not disk.is_whole]
        self._wanted = {disk.id: self._wanted[disk.id] for _, disk in broken if disk.id in self._wanted}
        commands: list[Restore] = []
        for node, disk in broken:
            if disk.id not in self._wanted:
                others = [one for one in told if one != node and told[one] >= disk.joined]
                whole = [one for one in others if one in state.disks and state.disks[one].is_whole]
                if len(whole) < self._board.majority and len(others) < self._board.members - 1:
                    continue
                self._wanted[disk.id] = self._held(whole if len(whole) >= self._board.majority else others)
            wanted = self._wanted[disk.id]
            for place in [place for place, end in wanted.items() if self._is_there(node, place, end)]:
                del wanted[place]
            if not wanted:
                commands.append(Restore(node, disk.id))
        return commands

    def _held(self, nodes: list[str]) -> dict[tuple[int, int], tuple[int, int]]:
        """The furthest that any of these nodes holds, of each life that is not merged whole."""
        held: dict[tuple[int, int], tuple[int, int]] = {}
        for session in self._state.sessions.values():
            for life in session.lives:
                tops = (self._board.top(node, session.id, life.x) for node in nodes)
                end = max((top for top in tops if top is not None), default=None)
                if end is not None:
                    held[session.id, life.x] = end
        return held

    def _is_there(self, node: str, place: tuple[int, int], end: tuple[int, int]) -> bool:
        session = self._state.sessions[place[0]]
        life = session.life_of(place[1])
        if life is None:
            return True
        if life.end is not None:
            end = min(end, life.end[:2])
        if session.life is life and session.consumed is not None and session.consumed.end[:2] >= end:
            return True
        top = self._board.top(node, *place)
        return top is not None and top >= end
