"""Plans which session bytes nodes copy from each other if the publisher does not send them to all nodes.

Pure. Invariants:
- Only bytes of open runs are copied, so that no final end changes.
- A node is requested to copy bytes after nothing new has arrived there for `QUIET_NS`. Bytes that arrive at
  other nodes do not count, because a publisher may reach only some nodes and never pause.
- A repeated request changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from msgspec import Struct, field

from sequencer.leader.replication_tracker import ReplicationTracker
from sequencer.state.state import SequencerState, Session

QUIET_NS: Final = 3 * 10**9
"""A node is quiet if nothing of a session arrived there for this time: a publisher would have reconnected by
then.
"""
POLL_NS: Final = 10**9


class FetchRequest(NamedTuple):
    """`node` is missing bytes of a session that `holder` has, up to an offset of `log.X.Y`."""

    node: str
    holder: str
    session_id: int
    run: int
    roll: int
    offset: int


class _Watch(Struct):
    """A session whose nodes may hold different ends."""

    since_ns: int
    """When this started."""
    news_ns: dict[str, int] = field(default_factory=dict)
    """By node: when it last reported new bytes, or was last asked to copy them."""

    def last_ns(self, node: str) -> int:
        """The time since which nothing new arrived at that node."""
        return self.news_ns.get(node, self.since_ns)


class PeerFetchPlanner:
    """Sessions that do not advance on a node although another node holds more."""

    def __init__(self, state: SequencerState, tracker: ReplicationTracker) -> None:
        self._state, self._tracker = state, tracker
        self._watched: dict[int, _Watch] = {}
        """By session id."""
        self._poll_ns = 0

    def on_news(self, session_id: int, node: str, now_ns: int) -> None:
        """A node reported new bytes of a session."""
        watch = self._watched.get(session_id)
        if watch is None:
            watch = self._watched[session_id] = _Watch(now_ns)
        watch.news_ns[node] = now_ns

    def forget_session(self, session_id: int) -> None:
        self._watched.pop(session_id, None)

    def on_node(self, node: str, now_ns: int) -> None:
        """A node was restarted, and may hold less than before."""
        for session in self._state.sessions.values():
            if session.active_runs:
                self.on_news(session.id, node, now_ns)

    def plan(self, nodes: Collection[str], now_ns: int) -> list[FetchRequest]:
        """Return what to copy to each of these nodes where nothing new arrived for long enough."""
        if now_ns < self._poll_ns:
            return []
        self._poll_ns = now_ns + POLL_NS
        found: list[FetchRequest] = []
        for session_id, watch in list(self._watched.items()):
            still = sum(now_ns - watch.last_ns(node) >= QUIET_NS for node in nodes)
            if not still:
                continue
            is_quiet = still == len(nodes)
            requests = self._missing(session_id, nodes, is_quiet=is_quiet)
            if is_quiet and not requests and not self._has_more(session_id):
                del self._watched[session_id]
            for request in requests:
                if now_ns - watch.last_ns(request.node) >= QUIET_NS:
                    watch.news_ns[request.node] = now_ns
                    found.append(request)
        return found

    def _has_more(self, session_id: int) -> bool:
        """Whether runs wait behind the one that is merged: nodes may have reported those already."""
        session = self._state.sessions.get(session_id)
        return session is not None and len(session.active_runs) > 1

    def _missing(self, session_id: int, nodes: Collection[str], *, is_quiet: bool) -> list[FetchRequest]:
        session = self._state.sessions.get(session_id)
        if session is None or not _is_open(session) or session_id in self._tracker.disagreements:
            return []
        assert session.active is not None
        run = session.active.run
        tops = {node: self._tracker.top(node, session_id, run) for node in nodes}
        holder, top = max(tops.items(), key=lambda one: one[1] or (-1, 0), default=("", None))
        if top is None:
            return []
        # Merged bytes are fetched by the merger. A session that advances elsewhere will have more.
        if is_quiet and session.consumed is not None and session.consumed.end[:2] >= top:
            return []
        return [
            FetchRequest(node, holder, session_id, run, *top)
            for node, has in tops.items()
            if has is None or has < top
        ]


def _is_open(session: Session) -> bool:
    """Whether nodes still accept bytes of the current run."""
    active = session.active
    return active is not None and not active.is_fenced
