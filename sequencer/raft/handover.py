"""Handing leadership over: to whom, and when it is given up. Pure. (Ongaro's dissertation, section 3.10.)

The law: a leader that hands over adds nothing to its log, and calls one member to stand for election, once,
when that member's synced log is known to be all of the leader's. The call is bound to the leader's term, in
which it is heeded once. Whatever becomes of it, what follows is an election as any other: nobody gives a vote
to a log that lacks what its own has, or a second one in a term; a leader of whose call nothing came by a
deadline goes on leading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class HandOver:
    """A leader's wish that another member led."""

    until: float
    """When it is given up, by PySyncObj's clock."""
    successor: str | None = None
    """Who was called to stand."""

    def choose(self, matched: Mapping[str, int], last: int) -> str | None:
        """Whom to call now, if somebody: the member that is furthest, once it is at `last`.

        `matched` says for each connected member that counts how far its synced log agrees.
        """
        if self.successor is not None or not matched:
            return None
        furthest = max(matched, key=lambda peer: (matched[peer], peer))
        if matched[furthest] < last:
            return None
        self.successor = furthest
        return furthest
