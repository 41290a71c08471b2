"""Which sessions the leader closes because no publisher came for too long, and whose records it lets go.

Pure. Invariants:
- A session is closed only after `session_idle_minutes` in which no node had a stream of its publisher, nor
  reported anything new of it. The time begins again with each leader, for only the leader hears of streams.
  Time in which the leader itself stood still does not count.
- Of closed sessions the last `CLOSED_KEPT` are remembered whole. The record of an older one goes once a
  majority has merged durably all that was merged of it, so that every node can get it from those.
- A hard reset closes all sessions at once. Their publishers have `session_idle_minutes` to come again before
  such a record goes. That time begins again with each leader, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from sequencer.state.apply_result import Forgotten, Outcome, RangesMerged, RunClosed, RunOpened
from sequencer.state.commands import FORGET_MAX, Forget
from sequencer.state.state import CLOSED_KEPT, SequencerState

MINUTE_NS: Final = 60 * 10**9
LOOK_NS: Final = 10 * 10**9
FORGET_AT_ONCE: Final = 64
"""So many records go together, if so many are too many: fewer commands."""


class IdleSessions:
    """When the leader last heard of the publisher of each open session."""

    def __init__(self, state: SequencerState, now_ns: int) -> None:
        self._state, self._began_ns = state, now_ns
        self._heard_ns: dict[int, int] = {}
        """By session id; of the others nothing was heard since the beginning."""
        self._look_ns = now_ns + LOOK_NS
        self._still_ns = 0
        """How long this process stood still. What is noted is the time without it."""

    def on_heard(self, session_ids: Iterable[int], now_ns: int) -> None:
        """Their publishers push to a node, or something new of them came."""
        self._heard_ns.update(dict.fromkeys(session_ids, now_ns - self._still_ns))

    def on_applied(self, outcome: Outcome, now_ns: int) -> None:
        """A command was applied."""
        match outcome:
            case RunOpened(session_id):
                self._heard_ns[session_id] = now_ns - self._still_ns
            case Forgotten(session_ids):
                for session_id in session_ids:
                    self._heard_ns.pop(session_id, None)

    def plan(self, now_ns: int) -> list[int]:
        """The open sessions that were idle for too long; looked at now and then."""
        if now_ns < self._look_ns:
            return []
        late_ns, self._look_ns = now_ns - self._look_ns, now_ns + LOOK_NS
        if late_ns > LOOK_NS:
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
            if session.lives and self._heard_ns.get(session_id, self._began_ns) <= before_ns
        ]


class OldSessions:
    """The closed sessions that are too many to be remembered."""

    def __init__(self, state: SequencerState, now_ns: int, *, kept: int = CLOSED_KEPT) -> None:
        self._state, self._began_ns, self._kept = state, now_ns, kept
        self._look_ns = now_ns
        self._begin = state.instruction
        self._merged: dict[int, int] = {}
        """By session id: at which instruction it was closed; the others, at `_begin` or before."""

    def on_applied(self, outcome: Outcome) -> None:
        """A command was applied."""
        match outcome:
            case RunClosed(session_id):
                self._note(session_id)
            case RangesMerged(order):
                for end in order.consumed:
                    self._note(end.session_id)
            case Forgotten(session_ids):
                for session_id in session_ids:
                    self._merged.pop(session_id, None)

    def _note(self, session_id: int) -> None:
        if session_id in self._state.closed:
            self._merged[session_id] = self._state.instruction

    def plan(self, merged: Collection[int], majority: int, now_ns: int) -> Forget | None:
        """The records to let go of; `merged`: up to which instruction nodes have merged durably."""
        too_many = len(self._state.closed) - self._kept
        if too_many < FORGET_AT_ONCE or len(merged) < majority or now_ns < self._look_ns:
            return None
        closed = [one for one in self._state.closed if not self._is_awaited(one, now_ns)]
        too_many = len(closed) - self._kept
        if too_many < FORGET_AT_ONCE:
            self._look_ns = now_ns + LOOK_NS  # Each look costs as much as there are records.
            return None
        durable = sorted(merged, reverse=True)[majority - 1]
        oldest = closed[: min(too_many, FORGET_MAX)]
        gone = tuple(one for one in oldest if self._merged.get(one, self._begin) <= durable)
        return Forget(gone) if gone else None

    def _is_awaited(self, session_id: int, now_ns: int) -> bool:
        """Whether a hard reset closed it, and its publisher may still come."""
        session, minutes = self._state.sessions[session_id], self._state.configuration.session_idle_minutes
        is_early = not minutes or now_ns < self._began_ns + minutes * MINUTE_NS
        return is_early and not session.is_superseded and session.last_run < session.fenced_end
