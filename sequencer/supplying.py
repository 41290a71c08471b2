"""Which session bytes nodes are to copy from each other, because no publisher brings them any more.

Pure. The law: only of lives that are open, so that nobody's final end changes; what is told again changes
nothing, and while anything new comes by itself nothing is told.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from sequencer.board import Board
from sequencer.state import Session, State

QUIET_NS: Final = 3 * 10**9
"""So long nothing came of a session: whoever sends it would have been back."""
LOOK_NS: Final = 10**9


class Lack(NamedTuple):
    """`node` lacks what `holder` has of a session, up to an offset of `log.x.y`."""

    node: str
    holder: str
    session_id: int
    x: int
    y: int
    offset: int


class Supplying:
    """What the leader knows of nodes that stand still at different ends of the same session."""

    def __init__(self, state: State, board: Board) -> None:
        self._state, self._board = state, board
        self._news_ns: dict[int, int] = {}
        """By session id: when a node last said something new, or was last told something, of those that may
        be uneven."""
        self._look_ns = 0

    def on_news(self, session_id: int, now_ns: int) -> None:
        """A node reported something of a session."""
        self._news_ns[session_id] = now_ns

    def on_node(self, now_ns: int) -> None:
        """A node has begun anew, and may hold less than it did."""
        for session in self._state.sessions.values():
            if session.lives:
                self._news_ns[session.id] = now_ns

    def plan(self, nodes: Collection[str], now_ns: int) -> list[Lack]:
        """What these nodes lack of sessions that were quiet for long enough."""
        if now_ns < self._look_ns:
            return []
        self._look_ns = now_ns + LOOK_NS
        found: list[Lack] = []
        for session_id, news_ns in list(self._news_ns.items()):
            if now_ns - news_ns < QUIET_NS:
                continue
            lacks = self._lacks(session_id, nodes)
            if lacks:
                self._news_ns[session_id] = now_ns
            else:
                del self._news_ns[session_id]
            found += lacks
        return found

    def _lacks(self, session_id: int, nodes: Collection[str]) -> list[Lack]:
        session = self._state.sessions.get(session_id)
        if session is None or not _is_open(session) or session_id in self._board.disagreements:
            return []
        assert session.life is not None
        x = session.life.x
        tops = {node: self._board.top(node, session_id, x) for node in nodes}
        holder, top = max(tops.items(), key=lambda one: one[1] or (-1, 0), default=("", None))
        if top is None or (session.consumed is not None and session.consumed.end[:2] >= top):
            return []
        return [
            Lack(node, holder, session_id, x, *top) for node, has in tops.items() if has is None or has < top
        ]


def _is_open(session: Session) -> bool:
    """Whether bytes of the life that is being merged are still taken."""
    life = session.life
    return life is not None and life.end is None and not life.is_fenced
