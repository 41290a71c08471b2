"""Which lives of publishers the leader ends, and where: fences and closes.

Pure. A life that has a successor is fenced on all nodes; then each reports the final end of what it holds,
and the furthest of enough of them is where the life ends. The law: nothing that was acknowledged as
replicated is behind that end. A sealed run needs neither, as its end was known before a byte of it was taken;
it is fenced only if its bytes may never come (`sequencer.state.run_lifecycle`).

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

For the bytes that merge instructions name it is alike. When an instruction is committed, a majority holds its
input, and each of these nodes keeps it at least until its own merged log holds it (`session_retention`). A
disk is restored only once its node has merged, durably, all that was committed when the disk had joined. So
nodes that hold the input, or merged it, and disks that were lost and are not restored make up a majority, at
any time; while less than a majority of disks is not whole some node has the bytes.

Where all nodes have their say, whole or not, nobody is left who may know more, so that is enough as well; and
so it is, to restore a disk, if it holds all that all others held.

What only one node held of a closed life may be lost with its disk before others have copied it. It was not
acknowledged then, for no majority held it; so once all nodes have said what they hold, and no sender has
more, the life is closed anew at the furthest end that is left: else nothing behind it would ever be merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sequencer.leader.replication_tracker import ReplicationTracker, SegmentKey
from sequencer.state.apply_result import (
    DiskJoined,
    DiskRestored,
    Forgotten,
    Outcome,
    RangesMerged,
    RunClosed,
    RunFenced,
    RunOpened,
)
from sequencer.state.commands import CloseRun, FenceRun, RestoreDisk
from sequencer.state.run_lifecycle import waits
from sequencer.state.state import BEGIN, End, SequencerState, Session
from sequencer.state.write_plan import SessionEnd


def are_enough(state: SequencerState, board: ReplicationTracker, nodes: Collection[str]) -> bool:
    """Whether nobody else can know of more than these nodes do, of what was acknowledged as replicated."""
    if len(nodes) >= board.members:
        return True
    whole = sum(node in state.disks and state.disks[node].is_whole for node in nodes)
    return whole >= board.majority


class SessionCloser:
    """The lives that are to end, looked at again when something is new that their ends depend on."""

    def __init__(self, state: SequencerState, board: ReplicationTracker) -> None:
        self._state, self._board = state, board
        self.due = set(state.sessions)
        """The sessions that are looked at next."""
        self._closed = {
            session.id
            for session in state.sessions.values()
            if session.life is not None and session.life.is_fenced and session.life.end is not None
        }
        """Those whose life is closed, and not merged whole."""
        self._given_up: set[int] = set()
        """Those whose publisher is not waited for: none came for too long, or an operator says so."""

    def on_news(self, session_ids: Iterable[int]) -> None:
        """Nodes told more of these sessions."""
        self.due.update(session_id for session_id in session_ids if self._is_ending(session_id))

    def give_up(self, session_ids: Iterable[int]) -> None:
        """End what is open of these: nobody waits for their publishers any more."""
        self._given_up.update(session_ids)
        self.due.update(self._given_up)

    def on_heard(self, session_ids: Iterable[int]) -> None:
        """The publishers of these are connected: they may still bring what nodes are missing."""
        self._given_up.difference_update(session_ids)

    def on_applied(self, outcome: Outcome) -> None:
        """Take note of the sessions that a command may have brought nearer to an end."""
        match outcome:
            case RunOpened(session_id):
                self.due |= {session_id, self._state.sessions[session_id].waits_for} - {0}
                self._given_up.discard(session_id)
            case RunClosed(session_id):
                self.due.add(session_id)
                self._closed.add(session_id)
            case RunFenced(session_id, _, is_given_up):
                self.due.add(session_id)
                if is_given_up:
                    self._given_up.add(session_id)
            case Forgotten(session_ids):
                self._given_up.difference_update(session_ids)
                self._closed.difference_update(session_ids)
            case RangesMerged(order):
                self.due.update(end.session_id for end in order.consumed if self._is_ending(end.session_id))
            case DiskJoined() | DiskRestored():
                self.due.update(self._state.sessions)

    def plan(self) -> list[FenceRun | CloseRun]:
        """What can be proposed now, again and again until it is applied; each session's one by one."""
        commands: list[FenceRun | CloseRun] = []
        for session_id in list(self.due):
            command = self._look(session_id)
            if isinstance(command, FenceRun | CloseRun):
                commands.append(command)
            elif not command:
                self.due.discard(session_id)
        return commands

    def plan_lost(self, told: Mapping[str, int]) -> list[CloseRun]:
        """Nearer ends of the lives whose end no node can reach; `told` as for `DiskRestoration.plan`."""
        if len(told) < self._board.members or min(told.values()) < self._state.joins:
            return []
        return [
            close for session_id in list(self._closed) if (close := self._nearer_end(session_id)) is not None
        ]

    def _nearer_end(self, session_id: int) -> CloseRun | None:
        session, board = self._state.sessions.get(session_id), self._board
        life = session.life if session is not None else None
        if session is None or life is None or life.end is None or not life.is_fenced:
            self._closed.discard(session_id)
            return None
        left = session.consumed.end if session.consumed is not None else End(*BEGIN, 0)
        for roll, offset in board.tops(session_id, life.run):
            number = board.number_at(SegmentKey(session_id, life.run, roll), offset)
            if number is not None and (roll, offset) > left[:2]:
                left = End(roll, offset, number)
        announced = board.announced(session_id, life.run)
        is_left = session.is_superseded or session_id in self._given_up
        if not is_left and (announced is None or (announced.roll, announced.offset) > left[:2]):
            return None  # A sender has it yet.
        return CloseRun(session_id, life.run, *left) if left[:2] < life.end[:2] else None

    def _is_ending(self, session_id: int) -> bool:
        session = self._state.sessions.get(session_id)
        if session is None:
            return False
        is_fenced = session.life is not None and session.life.is_fenced
        return session.is_superseded or len(session.lives) > 1 or is_fenced or session_id in self._given_up

    def _look(self, session_id: int) -> FenceRun | CloseRun | bool:
        """The command that a session needs; or whether it only waits for an older incarnation."""
        state, board = self._state, self._board
        session = state.sessions.get(session_id)
        life = session.life if session is not None else None
        if session is None or life is None or session.id in board.disagreements:
            return False
        if not self._is_ending(session_id) or (life.is_fenced and life.end is not None):
            return False
        if not life.is_fenced:
            is_given_up = session.id in self._given_up
            if life.end is not None and not _falls_short(session, life.run, life.end, board):
                # All of a sealed run may be there, or come: then it needs no fence.
                end = SessionEnd(session.id, life.run, *life.end)
                return (
                    (is_given_up or session.is_superseded)
                    and not _has(session, board, end)
                    and FenceRun(session.id, life.run)
                )
            may_fence = is_given_up or _may_be_fenced(session, life.run, board)
            return may_fence and FenceRun(session.id, life.run)
        finals = board.finals(session.id, life.run)
        if not are_enough(state, board, finals):
            return False
        if waits(state, session):
            return True
        # A node that was built anew, or trimmed its copy, holds less than what is merged.
        merged = [session.consumed.end] if session.consumed is not None else []
        return CloseRun(session.id, life.run, *max(merged + [End(*final[2:]) for final in finals.values()]))


def _may_be_fenced(session: Session, run: int, board: ReplicationTracker) -> bool:
    """Whether a majority has all that the sender still had of it, or no sender will come.

    A life whose sender may still come is not fenced before a majority has all that the sender says it has:
    what it keeps on its own disk is not given up, however long it is cut off.
    """
    if session.is_superseded:
        return True
    announced = board.announced(session.id, run)
    return announced is not None and _has(session, board, announced)


def _falls_short(session: Session, x: int, end: End, board: ReplicationTracker) -> bool:
    """Whether the sender now says that a sealed run ends before the end that it was opened with."""
    announced = board.announced(session.id, x)
    return announced is not None and (announced.roll, announced.offset) < end[:2]


def _has(session: Session, board: ReplicationTracker, end: SessionEnd) -> bool:
    if session.consumed is not None and session.consumed.end.number >= end.number:
        return True
    if (end.roll, end.offset) == BEGIN:
        return True
    return board.mark_at(SegmentKey(end.session_id, end.run, end.roll), end.offset) is not None


class DiskRestoration:
    """Watches how disks that are not whole get what the ones before them had."""

    def __init__(self, state: SequencerState, board: ReplicationTracker) -> None:
        self._state, self._board = state, board
        self._wanted: dict[bytes, dict[tuple[int, int], tuple[int, int]]] = {}
        """By disk: where, of each life, it must have come to."""
        self._merged: dict[bytes, int] = {}
        """By disk: the instruction up to which its node must have merged durably."""

    def plan(self, told: Mapping[str, int], merged: Mapping[str, int], planned: int = 0) -> list[RestoreDisk]:
        """The disks that are whole again.

        `told`: how many disks had joined when each node last held nothing that is not on the board by now.
        `merged`: the last instruction that each node has merged durably. `planned`: the last one that is in
        flight. It may count on what the disk before held.
        """
        state = self._state
        broken = [(node, disk) for node, disk in state.disks.items() if not disk.is_whole]
        self._wanted = {disk.id: self._wanted[disk.id] for _, disk in broken if disk.id in self._wanted}
        last = max(planned, state.instruction)
        self._merged = {disk.id: self._merged.get(disk.id, last) for _, disk in broken}
        commands: list[RestoreDisk] = []
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
            # What is said of merging may be of the disk before, until this one has told what it holds.
            reached = merged.get(node, 0) if told.get(node, 0) >= disk.joined else 0
            if not wanted and reached >= self._merged[disk.id]:
                commands.append(RestoreDisk(node, disk.id))
        return commands

    def _held(self, nodes: list[str]) -> dict[tuple[int, int], tuple[int, int]]:
        """The furthest that any of these nodes holds, of each life that is not merged whole."""
        held: dict[tuple[int, int], tuple[int, int]] = {}
        for session in self._state.sessions.values():
            for life in session.lives:
                tops = (self._board.top(node, session.id, life.run) for node in nodes)
                end = max((top for top in tops if top is not None), default=None)
                if end is not None:
                    held[session.id, life.run] = end
        return held

    def _is_there(self, node: str, place: tuple[int, int], end: tuple[int, int]) -> bool:
        session = self._state.sessions.get(place[0])
        life = session.life_of(place[1]) if session is not None else None
        if session is None or life is None:
            return True
        if life.end is not None:
            end = min(end, life.end[:2])
        if session.life is life and session.consumed is not None and session.consumed.end[:2] >= end:
            return True
        top = self._board.top(node, *place)
        return top is not None and top >= end
