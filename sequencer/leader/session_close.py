"""Decides which runs the leader ends, and where: it proposes fences and closes.

Pure. A run with a successor is fenced on all nodes. Then each node reports the final end of the bytes that it
holds. When enough nodes have reported, the furthest of these ends becomes the end of the run. Invariant: no
bytes that were acknowledged as replicated are after that end. A sealed run needs no fence and no close,
because its end was known before a byte of it was accepted. It is fenced only if its bytes may never come
(`sequencer.state.run_lifecycle`).

Proof: bytes acknowledged up to an end `e` were durable on a majority. Any other majority has a node in common
with this majority. That node reports at least `e`, unless its disk was lost since. So if the disk of a node
replaced another one while runs were open, the node does not count (its disk is not *whole*) until it has
again all bytes that the lost disk might have reported. Then, at any time, every majority of nodes with whole
disks has a node that holds `e`, or `e` is merged:

- When `e` is acknowledged, a majority holds it, and every majority of whole disks shares a node with that
  majority.
- A lost disk is replaced by one that is not whole. The rest of each majority stays as it was.
- A disk is restored when, for each run, it holds everything that a majority of whole disks held after it had
  joined. It need not hold bytes that are merged, or bytes after the end at which the run was closed since.
  Bytes that the lost disk acknowledged were acknowledged before that. So a node of that majority held `e`,
  and now the restored disk holds it. For bytes acknowledged later, the new disk was present.

The same holds for the bytes that merge instructions name. When an instruction is committed, a majority holds
its input. Each of these nodes keeps the input at least until its own merged log holds it
(`session_retention`). A disk is restored only after its node has durably merged everything that was committed
when the disk joined. So at any time, the nodes that hold the input or merged it, together with the lost disks
that are not restored, are a majority. While fewer than a majority of the disks are not whole, at least one
node has the bytes.

The reports of all nodes are enough too, even if disks are not whole, because no other node can know more. In
the same way, a disk is restored if it holds everything that all other disks held.

If only one node held some bytes of a closed run, they may be lost with its disk before other nodes have
copied them. They were not acknowledged, because no majority held them. So when all nodes have reported, and
no publisher has more, the run is closed again at the furthest end that is left. Otherwise nothing after this
end would ever be merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Final

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
from sequencer.state.commands import RestoreDisk
from sequencer.state.run_lifecycle import waits
from sequencer.state.session_commands import LATER_MAX, CloseRun, FenceRun, may_be_end
from sequencer.state.state import BEGIN, End, SequencerState, Session
from sequencer.state.write_plan import SessionEnd

AWAY_NS: Final = 15 * 10**9
"""If no node has reported a publisher for this time, the publisher is not connected. Nodes report every few
seconds.
"""


def is_quorum_of_disks(state: SequencerState, tracker: ReplicationTracker, nodes: Collection[str]) -> bool:
    """Whether these nodes know all bytes that were acknowledged as replicated."""
    if len(nodes) >= tracker.members:
        return True
    whole = sum(node in state.disks and state.disks[node].is_whole for node in nodes)
    return whole >= tracker.majority


class SessionCloser:
    """Tracks the runs that must end. They are checked again when a fact changes on which their ends
    depend.
    """

    def __init__(self, state: SequencerState, tracker: ReplicationTracker, began_ns: int = 0) -> None:
        """`began_ns`: the time since which nodes report the connected publishers to this leader."""
        self._state, self._tracker, self._began_ns = state, tracker, began_ns
        self.due = set(state.sessions)
        """The sessions to check next."""
        self._closed = {
            session.id
            for session in state.sessions.values()
            if session.active is not None and session.active.is_fenced and session.active.end is not None
        }
        """Sessions whose current run is closed and not merged completely."""
        self._given_up: set[int] = set()
        """Sessions that end without waiting for their publisher: it was idle too long, or an operator closed
        the session.
        """
        self._asked: set[int] = set()
        """Sessions that an operator closed, and whose publisher may be connected."""
        self._heard_ns: dict[int, int] = {}
        """By session id: when its publisher was last connected."""

    def on_news(self, session_ids: Iterable[int]) -> None:
        """Handle new reports of nodes about these sessions."""
        self.due.update(session_id for session_id in session_ids if self._is_ending(session_id))

    def give_up(self, session_ids: Iterable[int]) -> None:
        """End the open runs of these sessions without waiting for their publishers."""
        self._given_up.update(session_ids)
        self.due.update(self._given_up)

    def give_up_closed(self, now_ns: int) -> None:
        """Give up the sessions that an operator closed, once it is known that no publisher is connected."""
        away = [one for one in self._asked if now_ns - self._heard_ns.get(one, self._began_ns) >= AWAY_NS]
        if away:
            self._asked.difference_update(away)
            self.give_up(away)

    def on_heard(self, session_ids: Collection[int], now_ns: int) -> None:
        """Record that the publishers of these sessions are connected: they may still send bytes that nodes
        need.
        """
        self._given_up.difference_update(session_ids)
        self._asked.difference_update(session_ids)
        self._heard_ns.update(dict.fromkeys(session_ids, now_ns))

    def on_applied(self, outcome: Outcome) -> None:
        """Record which sessions a command may have brought closer to an end."""
        match outcome:
            case RunOpened(session_id):
                self.due |= {session_id, self._state.sessions[session_id].waits_for} - {0}
                self._given_up.discard(session_id)
                self._asked.discard(session_id)
            case RunClosed(session_id):
                self.due.add(session_id)
                self._closed.add(session_id)
            case RunFenced(session_id, _, is_given_up):
                self.due.add(session_id)
                if is_given_up:
                    self._asked.add(session_id)
            case Forgotten(session_ids):
                self._given_up.difference_update(session_ids)
                self._asked.difference_update(session_ids)
                for session_id in session_ids:
                    self._heard_ns.pop(session_id, None)
                self._closed.difference_update(session_ids)
            case RangesMerged(plan):
                self.due.update(end.session_id for end in plan.consumed if self._is_ending(end.session_id))
            case DiskJoined() | DiskRestored():
                self.due.update(self._state.sessions)

    def plan(self) -> list[FenceRun | CloseRun]:
        """The commands to propose now, at most one for each session. They are returned again until they are
        applied.
        """
        commands: list[FenceRun | CloseRun] = []
        for session_id in list(self.due):
            command = self._next_command(session_id)
            if isinstance(command, FenceRun | CloseRun):
                commands.append(command)
            elif not command:
                self.due.discard(session_id)
        return commands

    def plan_lost(self, joins: Mapping[str, int]) -> list[CloseRun]:
        """Commands that close runs at an earlier end, because no node can reach the present end. `joins`: see
        `DiskRestoration.plan`.
        """
        if len(joins) < self._tracker.members or min(joins.values()) < self._state.joins:
            return []
        return [
            close for session_id in list(self._closed) if (close := self._nearer_end(session_id)) is not None
        ]

    def _nearer_end(self, session_id: int) -> CloseRun | None:
        session, tracker = self._state.sessions.get(session_id), self._tracker
        active = session.active if session is not None else None
        if session is None or active is None or active.end is None or not active.is_fenced:
            self._closed.discard(session_id)
            return None
        left = session.consumed.end if session.consumed is not None else End(*BEGIN, 0)
        for roll, offset in tracker.tops(session_id, active.run):
            number = tracker.number_at(SegmentKey(session_id, active.run, roll), offset)
            if number is not None and (roll, offset) > left[:2]:
                left = End(roll, offset, number)
        announced = tracker.announced(session_id, active.run)
        is_left = session.is_superseded or session_id in self._given_up
        if not is_left and (announced is None or (announced.roll, announced.offset) > left[:2]):
            return None  # Its publisher still has the rest.
        if left[:2] >= active.end[:2]:
            return None
        return CloseRun(session_id, active.run, *left, announced=_announced(tracker, session_id, active.run))

    def _is_ending(self, session_id: int) -> bool:
        session = self._state.sessions.get(session_id)
        if session is None:
            return False
        is_fenced = session.active is not None and session.active.is_fenced
        return (
            session.is_superseded or len(session.active_runs) > 1 or is_fenced or session_id in self._given_up
        )

    def _next_command(self, session_id: int) -> FenceRun | CloseRun | bool:
        """Return the command that a session needs. True if the session must be checked again: it waits for an
        older incarnation.
        """
        state, tracker = self._state, self._tracker
        session = state.sessions.get(session_id)
        active = session.active if session is not None else None
        if session is None or active is None or session.id in tracker.disagreements:
            return False
        if not self._is_ending(session_id) or (active.is_fenced and active.end is not None):
            return False
        is_given_up = session.id in self._given_up
        later = self._to_fence(session) if is_given_up or session.is_superseded else ()
        if not active.is_fenced:
            if active.end is not None and not _falls_short(session, active.run, active.end, tracker):
                # A sealed run needs no fence if it is complete or can still become complete.
                end = SessionEnd(session.id, active.run, *active.end)
                return (
                    (is_given_up or session.is_superseded)
                    and not _has(session, tracker, end)
                    and FenceRun(session.id, active.run, later)
                )
            may_fence = is_given_up or _may_be_fenced(session, active.run, tracker)
            return may_fence and FenceRun(session.id, active.run, later)
        if later:
            return FenceRun(session.id, later[0], later[1:])
        finals = tracker.finals(session.id, active.run)
        if not is_quorum_of_disks(state, tracker, finals):
            return False
        if waits(state, session):
            return True
        # A new disk, or a replica that was trimmed, holds less than what is merged.
        merged = [session.consumed.end] if session.consumed is not None else []
        furthest = max(merged + [End(*final[2:]) for final in finals.values()])
        announced = _announced(tracker, session.id, active.run)
        return CloseRun(session.id, active.run, *furthest, self._to_close_empty(session), announced)

    def _to_fence(self, session: Session) -> tuple[int, ...]:
        """For a session without a publisher: the later runs that may never get the bytes that they need to
        end.
        """
        tracker = self._tracker

        def is_complete(run: int, end: End) -> bool:
            key = SegmentKey(session.id, run, end.roll)
            is_held = end[:2] == BEGIN or tracker.boundary_at(key, end.offset) is not None
            return is_held and not _falls_short(session, run, end, tracker)

        open_runs = (one for one in session.active_runs[1:] if not one.is_fenced)
        runs = (one.run for one in open_runs if one.end is None or not is_complete(one.run, one.end))
        return tuple(islice(runs, LATER_MAX))

    def _to_close_empty(self, session: Session) -> tuple[int, ...]:
        """The later runs that are fenced, and of which no byte was acknowledged and no byte is left.

        If the end of a run was announced after it was opened, the run is closed alone, with that end: it is
        cut short.
        """
        fenced = (one for one in session.active_runs[1:] if one.is_fenced and one.end is None)
        runs = (
            one.run for one in fenced if one.announced or not _is_announced(session, one.run, self._tracker)
        )
        empty = (run for run in runs if self._is_empty(self._tracker.finals(session.id, run)))
        return tuple(islice(empty, LATER_MAX))

    def _is_empty(self, finals: Mapping[str, SessionEnd]) -> bool:
        is_known = is_quorum_of_disks(self._state, self._tracker, finals)
        return is_known and all((end.roll, end.offset) == BEGIN for end in finals.values())


def _announced(tracker: ReplicationTracker, session_id: int, run: int) -> End | None:
    """The end that the publisher announced; None if it announced no end or an impossible one."""
    announced = tracker.announced(session_id, run)
    if announced is None or not may_be_end(announced.offset, announced.number):
        return None
    return End(*announced[2:])


def _is_announced(session: Session, run: int, tracker: ReplicationTracker) -> bool:
    """Whether the publisher announced bytes of a run."""
    announced = _announced(tracker, session.id, run)
    return announced is not None and announced[:2] > BEGIN


def _may_be_fenced(session: Session, run: int, tracker: ReplicationTracker) -> bool:
    """Whether a majority holds everything that the publisher still had, or no publisher will come.

    If the publisher of a run may come back, the run is not fenced before a majority holds everything that the
    publisher announced. Messages on the publisher's own disk are not abandoned, even if it is disconnected
    for a long time.
    """
    if session.is_superseded:
        return True
    announced = tracker.announced(session.id, run)
    return announced is not None and _has(session, tracker, announced)


def _falls_short(session: Session, x: int, end: End, tracker: ReplicationTracker) -> bool:
    """Whether the publisher now announces an earlier end of a sealed run than the end with which the run was
    opened.
    """
    announced = tracker.announced(session.id, x)
    return announced is not None and (announced.roll, announced.offset) < end[:2]


def _has(session: Session, tracker: ReplicationTracker, end: SessionEnd) -> bool:
    if session.consumed is not None and session.consumed.end.number >= end.number:
        return True
    if (end.roll, end.offset) == BEGIN:
        return True
    return tracker.boundary_at(SegmentKey(end.session_id, end.run, end.roll), end.offset) is not None


class DiskRestoration:
    """Tracks how disks that are not whole get the bytes of the disks that they replaced."""

    def __init__(self, state: SequencerState, tracker: ReplicationTracker) -> None:
        self._state, self._tracker = state, tracker
        self._wanted: dict[bytes, dict[tuple[int, int], tuple[int, int]]] = {}
        """By disk: for each run, the end that it must reach."""
        self._merged: dict[bytes, int] = {}
        """By disk: the instruction that its node must have merged durably."""

    def plan(
        self, joins: Mapping[str, int], merged: Mapping[str, int], planned: int = 0
    ) -> list[RestoreDisk]:
        """Return the commands that restore the disks that are whole again.

        `joins`: for each node, the number of joined disks at the last report of the node that the tracker has
        completely. `merged`: for each node, the last instruction that it has merged durably. `planned`: the
        last instruction in flight, which may rely on bytes of a lost disk.
        """
        state = self._state
        broken = [(node, disk) for node, disk in state.disks.items() if not disk.is_whole]
        self._wanted = {disk.id: self._wanted[disk.id] for _, disk in broken if disk.id in self._wanted}
        last = max(planned, state.instruction)
        self._merged = {disk.id: self._merged.get(disk.id, last) for _, disk in broken}
        commands: list[RestoreDisk] = []
        for node, disk in broken:
            if disk.id not in self._wanted:
                others = [one for one in joins if one != node and joins[one] >= disk.joined]
                whole = [one for one in others if one in state.disks and state.disks[one].is_whole]
                if len(whole) < self._tracker.majority and len(others) < self._tracker.members - 1:
                    continue
                self._wanted[disk.id] = self._held(whole if len(whole) >= self._tracker.majority else others)
            wanted = self._wanted[disk.id]
            for place in [place for place, end in wanted.items() if self._is_there(node, place, end)]:
                del wanted[place]
            # Before the new disk was reported, the reported merged end may be the end of the previous disk.
            reached = merged.get(node, 0) if joins.get(node, 0) >= disk.joined else 0
            if not wanted and reached >= self._merged[disk.id]:
                commands.append(RestoreDisk(node, disk.id))
        return commands

    def _held(self, nodes: list[str]) -> dict[tuple[int, int], tuple[int, int]]:
        """For each run that is not merged completely, the furthest end that any of these nodes holds."""
        held: dict[tuple[int, int], tuple[int, int]] = {}
        for session in self._state.sessions.values():
            for active in session.active_runs:
                tops = (self._tracker.top(node, session.id, active.run) for node in nodes)
                end = max((top for top in tops if top is not None), default=None)
                if end is not None:
                    held[session.id, active.run] = end
        return held

    def _is_there(self, node: str, place: tuple[int, int], end: tuple[int, int]) -> bool:
        session = self._state.sessions.get(place[0])
        active = session.run_of(place[1]) if session is not None else None
        if session is None or active is None:
            return True
        if active.end is not None:
            end = min(end, active.end[:2])
        if session.active is active and session.consumed is not None and session.consumed.end[:2] >= end:
            return True
        top = self._tracker.top(node, *place)
        return top is not None and top >= end
