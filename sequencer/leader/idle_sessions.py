"""Decides which sessions the leader closes as idle, and which records of closed sessions it deletes.

Pure. Invariants:
- A session is closed only after `session_idle_minutes` in which no node had a stream of its publisher or
  reported new bytes. The time restarts with each leader, because only the leader gets the reports. Time in
  which the leader's process was stopped does not count.
- The records of `CLOSED_KEPT` closed sessions are kept. Above that, the owner with the most records loses its
  oldest records, so that no certificate pushes out the records of others. A record is deleted once a majority
  has merged its session durably, so that every node can copy it from them.
- A hard reset closes all sessions. Such a record is deleted only after `session_idle_minutes` in which the
  publisher did not come back. This time restarts with each leader, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from rt.names import session_owner
from sequencer.state.apply_result import Forgotten, Outcome, RangesMerged, RunClosed, RunOpened
from sequencer.state.forgotten_sessions import taken_from_largest
from sequencer.state.session_commands import FORGET_MAX, Forget
from sequencer.state.state import CLOSED_KEPT, SequencerState

MINUTE_NS: Final = 60 * 10**9
POLL_NS: Final = 10 * 10**9
FORGET_AT_ONCE: Final = 64
"""Minimum number of records that are deleted together, to save commands."""


class IdleSessions:
    """When the publisher of each open session was last active."""

    def __init__(self, state: SequencerState, now_ns: int) -> None:
        self._state, self._began_ns = state, now_ns
        self._heard_ns: dict[int, int] = {}
        """By session id: when the publisher was last active. Publishers of other sessions were not active
        since the start.
        """
        self._poll_ns = now_ns + POLL_NS
        self._still_ns = 0
        """How long this process was stopped. Recorded times do not include it."""

    def on_heard(self, session_ids: Iterable[int], now_ns: int) -> None:
        """Record that the publishers of these sessions are active."""
        self._heard_ns.update(dict.fromkeys(session_ids, now_ns - self._still_ns))

    def on_applied(self, outcome: Outcome, now_ns: int) -> None:
        match outcome:
            case RunOpened(session_id):
                self._heard_ns[session_id] = now_ns - self._still_ns
            case Forgotten(session_ids):
                for session_id in session_ids:
                    self._heard_ns.pop(session_id, None)

    def plan(self, now_ns: int) -> list[int]:
        """The open sessions that were idle for too long; none if no check is due."""
        if now_ns < self._poll_ns:
            return []
        late_ns, self._poll_ns = now_ns - self._poll_ns, now_ns + POLL_NS
        if late_ns > POLL_NS:
            self._still_ns += late_ns
        state, minutes = self._state, self._state.configuration.session_idle_minutes
        if not minutes:
            return []
        before_ns = now_ns - self._still_ns - minutes * MINUTE_NS
        if self._began_ns > before_ns and not self._heard_ns:
            return []
        return [
            session_id
            for session_id, session in state.sessions.items()
            if session.active_runs and self._heard_ns.get(session_id, self._began_ns) <= before_ns
        ]


class OldSessions:
    """The closed sessions whose records exceed the limit."""

    def __init__(self, state: SequencerState, now_ns: int, *, kept: int = CLOSED_KEPT) -> None:
        self._state, self._began_ns, self._kept = state, now_ns, kept
        self._poll_ns = now_ns
        self._begin = state.instruction
        self._merged: dict[int, int] = {}
        """By session id: the instruction at which the session was closed. Other sessions were closed at
        `_begin` or before.
        """

    def on_applied(self, outcome: Outcome) -> None:
        match outcome:
            case RunClosed(session_id):
                self._record(session_id)
            case RangesMerged(plan):
                for end in plan.consumed:
                    self._record(end.session_id)
            case Forgotten(session_ids):
                for session_id in session_ids:
                    self._merged.pop(session_id, None)

    def _record(self, session_id: int) -> None:
        if session_id in self._state.closed:
            self._merged[session_id] = self._state.instruction

    def plan(self, merged: Collection[int], majority: int, now_ns: int) -> Forget | None:
        """The records to delete. `merged`: the last instruction that each node has merged durably."""
        too_many = len(self._state.closed) - self._kept
        if too_many < FORGET_AT_ONCE or len(merged) < majority or now_ns < self._poll_ns:
            return None
        closed = [one for one in self._state.closed if not self._is_awaited(one, now_ns)]
        too_many = len(closed) - self._kept
        if too_many < FORGET_AT_ONCE:
            self._poll_ns = now_ns + POLL_NS  # The cost of a check grows with the number of records.
            return None
        durable = sorted(merged, reverse=True)[majority - 1]
        by_owner: dict[str, list[int]] = {}
        for one in closed:
            by_owner.setdefault(session_owner(self._state.sessions[one].name), []).append(one)
        sizes = {owner: len(ids) for owner, ids in by_owner.items()}
        taken = taken_from_largest(sizes, min(too_many, FORGET_MAX))
        oldest = {one for owner, count in taken.items() for one in by_owner[owner][:count]}
        is_durable = (one for one in closed if self._merged.get(one, self._begin) <= durable)
        gone = tuple(one for one in is_durable if one in oldest)
        return Forget(gone) if gone else None

    def _is_awaited(self, session_id: int, now_ns: int) -> bool:
        """Whether a hard reset closed the session and its publisher may still come back."""
        session, minutes = self._state.sessions[session_id], self._state.configuration.session_idle_minutes
        is_early = not minutes or now_ns < self._began_ns + minutes * MINUTE_NS
        return is_early and not session.is_superseded and session.last_run < session.fenced_end
