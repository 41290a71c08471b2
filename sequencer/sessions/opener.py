"""Opens the replicas that this node must have, reports them, and reports final ends of fenced runs.

For one event loop. Invariants:
- A replica that cannot be opened is tried again for as long as its session is known.
- The join of a disk is confirmed only when the replicas here of all sessions that were open by then are open.
  So it is not confirmed before the commands of earlier terms were applied: a snapshot does not contain them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from replicator.protocol.messages import LogOffset
from rt.errors import Corrupt, RtError
from sequencer.ipc.data_reports import DataReports
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.merge_progress import consumed_number, consumed_place
from sequencer.sessions.replica import SessionReplica
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.apply_result import RunClosed
from sequencer.state.state import Session
from sequencer.state.write_plan import SessionEnd

OPEN_RETRY_S: Final = 2.0
"""Pause before a replica that could not be opened is tried again: there may be disk space by then."""
POLL_S: Final = 0.1
"""How often `confirm` checks whether all replicas are open."""

logger = logging.getLogger("sequencer")


class Opener:
    """Opens replicas of sessions that the state knows. `spawn` starts a task."""

    def __init__(
        self,
        follower: StateFollower,
        replicas: SessionReplicas,
        reports: DataReports,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_unopened: Callable[[Corrupt, int], int],
    ) -> None:
        """`on_unopened` gets the error of a corrupt replica, and its own result for the previous attempt: 0
        if that attempt had no error, or another error. The replica is tried again nevertheless.
        """
        self._follower, self._replicas, self._reports = follower, replicas, reports
        self._spawn, self._on_unopened = spawn, on_unopened
        self.unopened: dict[int, RtError] = {}
        """By session id: why its replica could not be opened; it is tried again."""
        self._opening: set[int] = set()
        """Sessions whose replicas are being opened."""
        self._control = 0
        """Counts the control processes that need a confirmation."""

    def report_session(self, session: Session, *, is_input: bool) -> None:
        """Report a session to a new control process; open its replica if there may be something to merge.

        `is_input`: a plan that is not executed yet may need the replica, even if the session is closed.
        """
        replica = self._replicas.get(session.id)
        if replica is not None:
            _record_merged(replica, session)
            for report in replica.reports(consumed_place(session)):
                self._reports.segment(report)
            if runs := [run for run in _ending(session) if run not in replica.finals]:
                self._spawn(self.report_final_ends(session.id, runs))
            self._report_closed_ends(replica, session)
        elif self._is_needed(session, is_input=is_input):
            self._open_soon(session.id)

    def _is_needed(self, session: Session, *, is_input: bool) -> bool:
        """Whether control, or the merger, must know the replica of a session."""
        if is_input and os.path.isdir(self._replicas.path(session.id)):
            return True
        opened = session.active
        return opened is not None and (opened.is_fenced or not self._replicas.is_closed_and_merged(session))

    def on_control_lost(self) -> None:
        """Cancel the confirmations for a control process that is disconnected or replaced."""
        self._control += 1

    def on_opened(self, session_id: int) -> None:
        """A run was opened: report the replica that an earlier process of this node left here."""
        if self._replicas.get(session_id) is None and os.path.isdir(self._replicas.path(session_id)):
            self._open_soon(session_id)

    def on_merged(self, end: SessionEnd) -> None:
        """The cluster merged a session up to `end`."""
        replica = self._replicas.get(end.session_id)
        if replica is not None:
            # It is enough if the publisher learns it from one node. The leader's node knows it first.
            place, is_leading = LogOffset(end.run, end.roll, end.offset), self._follower.is_leading
            replica.store.record_merged(place, end.number, is_urgent=is_leading)
        else:
            self._open_soon(end.session_id)

    def on_closed(self, closed: RunClosed) -> None:
        """Runs were closed: log it if messages of them are lost."""
        session = self._follower.session(closed.session_id)
        if closed.cut_short and session is not None:
            logger.error(
                "runs_cut_short session=%s id=%d count=%d first_run=%d",
                *(session.name, session.id, len(closed.cut_short), closed.cut_short[0]),
            )
        replica = self._replicas.get(closed.session_id)
        if replica is not None and session is not None:
            self._report_closed_ends(replica, session)

    def _report_closed_ends(self, replica: SessionReplica, session: Session) -> None:
        """Report the boundaries at the ends of closed runs, if this node has later bytes of them and has
        thinned these boundaries out. Otherwise a majority with this node would never be found to hold a run
        up to its end.
        """
        for one in session.active_runs:
            place = None if one.end is None else LogOffset(one.run, *one.end[:2])
            if place is not None and replica.has_thinned(place):
                self._spawn(self._report_boundary(replica, place))

    async def _report_boundary(self, replica: SessionReplica, place: LogOffset) -> None:
        with replica.in_use():
            boundary = await asyncio.to_thread(replica.boundary_at, place)
        if boundary is not None:
            self._reports.segment(replica.report(place.segment, [boundary]))

    async def report_final_ends(self, session_id: int, runs: Sequence[int]) -> None:
        """Runs were fenced: report their final ends."""
        replica = self._replicas.get(session_id)
        if replica is None:
            self._open_soon(session_id)  # `_open` reports them.
        else:
            await self._report_final_ends(replica, runs)

    async def _report_final_ends(self, replica: SessionReplica, runs: Iterable[int]) -> None:
        for run in runs:
            await self._replicas.report_final_end(replica, run)

    def confirm(self, joins: int) -> None:
        """Report, as soon as it is true, that everything durable here was reported after `joins` disks had
        joined.
        """
        self._spawn(self._confirm(joins, self._control))

    async def _confirm(self, joins: int, control: int) -> None:
        while control == self._control and not self._follower.is_caught_up:
            await asyncio.sleep(POLL_S)
        unread = set(self._opening)
        while unread & self._opening:
            await asyncio.sleep(POLL_S)
        if control == self._control:
            self._reports.joins(joins)

    # Opening

    async def opened(self, session_id: int) -> SessionReplica | None:
        """Open a replica, however long that takes; None if its session is not known any more."""
        logged, failures = "", 0
        try:
            while (session := self._follower.session(session_id)) is not None:
                try:
                    return await self._replicas.open_replica(session)
                except RtError as error:
                    self.unopened[session_id] = error
                    if isinstance(error, Corrupt):
                        failures = self._on_unopened(error, failures if str(error) == logged else 0)
                    if str(error) != logged:
                        logged = str(error)
                        logger.error(
                            "session_replica_failed session=%s id=%d error=%r",
                            *(session.name, session_id, logged),
                        )
                await asyncio.sleep(OPEN_RETRY_S)
            return None
        finally:
            self.unopened.pop(session_id, None)

    def _open_soon(self, session_id: int) -> None:
        """Open a replica, unless that is in progress, and report its final ends."""
        if session_id not in self._opening:
            self._opening.add(session_id)  # `_confirm` waits for it from now on.
            self._spawn(self._open(session_id))

    async def _open(self, session_id: int) -> None:
        try:
            replica = await self.opened(session_id)
        finally:
            self._opening.discard(session_id)
        session = self._follower.session(session_id)
        if replica is None or session is None:
            return
        _record_merged(replica, session)
        await self._report_final_ends(replica, _ending(session))
        self._report_closed_ends(replica, session)


def _ending(session: Session) -> list[int]:
    """The runs that are fenced and not closed."""
    return [one.run for one in session.active_runs if one.is_fenced and one.end is None]


def _record_merged(replica: SessionReplica, session: Session) -> None:
    place = consumed_place(session)
    if place is not None:
        replica.store.record_merged(place, consumed_number(session) or 0, is_urgent=True)
