"""Which session bytes nodes are to copy from each other, because no publisher brings them to all nodes.

Pure. Invariants:
- Only of lives that are open, so that no final end changes.
- A node is told of what it lacks once nothing new has come to it for `QUIET_NS`. What comes to other nodes
  does not count: a publisher may reach some nodes only, and never pause.
- What is told again changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sequencer.leader.replication_tracker import ReplicationTracker
from sequencer.state.state import SequencerState, Session

QUIET_NS: Final = 3 * 10**9
"""So long nothing came of a session to a node: whoever sends it there would have been back."""
LOOK_NS: Final = 10**9


class FetchRequest(NamedTuple):
    """`node` lacks what `holder` has of a session, up to an offset of `log.X.Y`."""

    node: str
    holder: str
    session_id: int
    run: int
    roll: int
    offset: int


@dataclass(slots=True)
class _Watch:
    """A session of which nodes may hold different ends."""

    since_ns: int
    """When it began to be one."""
    news_ns: dict[str, int] = field(default_factory=dict)
    """By node: when it last reported something new of it, or was last told to copy it."""

    def last_ns(self, node: str) -> int:
        """Since when that node stands still."""
        return self.news_ns.get(node, self.since_ns)


class PeerFetchPlanner:
    """What the leader knows of nodes that stand still before the end that another one holds."""

    def __init__(self, state: SequencerState, board: ReplicationTracker) -> None:
        self._state, self._board = state, board
        self._watched: dict[int, _Watch] = {}
        """By session id."""
        self._look_ns = 0

    def on_news(self, session_id: int, node: str, now_ns: int) -> None:
        """A node reported something new of a session."""
        watch = self._watched.get(session_id)
        if watch is None:
            watch = self._watched[session_id] = _Watch(now_ns)
        watch.news_ns[node] = now_ns

    def forget_session(self, session_id: int) -> None:
        """Its record is gone."""
        self._watched.pop(session_id, None)

    def on_node(self, node: str, now_ns: int) -> None:
        """A node has begun anew, and may hold less than it did."""
        for session in self._state.sessions.values():
            if session.lives:
                self.on_news(session.id, node, now_ns)

    def plan(self, nodes: Collection[str], now_ns: int) -> list[FetchRequest]:
        """What these nodes lack that stood still for long enough, whatever comes to others meanwhile."""
        if now_ns < self._look_ns:
            return []
        self._look_ns = now_ns + LOOK_NS
        found: list[FetchRequest] = []
        for session_id, watch in list(self._watched.items()):
            still = sum(now_ns - watch.last_ns(node) >= QUIET_NS for node in nodes)
            if not still:
                continue
            is_quiet = still == len(nodes)
            lacks = self._lacks(session_id, nodes, is_quiet=is_quiet)
            if is_quiet and not lacks and not self._has_more(session_id):
                del self._watched[session_id]
            for lack in lacks:
                if now_ns - watch.last_ns(lack.node) >= QUIET_NS:
                    watch.news_ns[lack.node] = now_ns
                    found.append(lack)
        return found

    def _has_more(self, session_id: int) -> bool:
        """Whether runs wait behind the one that is merged: nodes may have reported those already."""
        session = self._state.sessions.get(session_id)
        return session is not None and len(session.lives) > 1

    def _lacks(self, session_id: int, nodes: Collection[str], *, is_quiet: bool) -> list[FetchRequest]:
        session = self._state.sessions.get(session_id)
        if session is None or not _is_open(session) or session_id in self._board.disagreements:
            return []
        assert session.life is not None
        run = session.life.run
        tops = {node: self._board.top(node, session_id, run) for node in nodes}
        holder, top = max(tops.items(), key=lambda one: one[1] or (-1, 0), default=("", None))
        if top is None:
            return []
        # What is merged is fetched by the nodes' mergers. Of a session that goes on more is to come.
        if is_quiet and session.consumed is not None and session.consumed.end[:2] >= top:
            return []
        return [
            FetchRequest(node, holder, session_id, run, *top)
            for node, has in tops.items()
            if has is None or has < top
        ]


def _is_open(session: Session) -> bool:
    """Whether bytes of the life that is being merged are still taken."""
    life = session.life
    return life is not None and not life.is_fenced
