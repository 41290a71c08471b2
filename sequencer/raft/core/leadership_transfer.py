"""Leadership transfer: choice of the successor, and deadline. Pure. (Ongaro's dissertation, section 3.10.)

Invariants:
- During a transfer the leader appends nothing.
- The leader sends TimeoutNow once, to one member whose synced log equals the leader's log.
- TimeoutNow is valid only in the leader's term, and once.
- The election that follows obeys the normal voting rules.
- If no other leader appears by the deadline, the leader continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class LeadershipTransfer:
    """A transfer in progress."""

    until: float
    """Deadline, by PySyncObj's clock."""
    successor: str | None = None
    """The member to which TimeoutNow was sent."""

    def choose(self, matched: Mapping[str, int], last: int) -> str | None:
        """The member with the longest log, once it has entry `last`; else None.

        `matched`: for each connected member that counts, the index up to which its synced log agrees.
        """
        if self.successor is not None or not matched:
            return None
        furthest = max(matched, key=lambda peer: (matched[peer], peer))
        if matched[furthest] < last:
            return None
        self.successor = furthest
        return furthest
