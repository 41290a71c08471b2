"""Leadership transfer: choice of the successor, deadline, waiters. (Ongaro's dissertation, section 3.10.)

Invariants:
- During a transfer the leader appends nothing.
- The leader sends TimeoutNow once, to one member whose synced log equals the leader's log.
- TimeoutNow is valid only in the leader's term, and once.
- The election that follows obeys the normal voting rules.
- If no other leader appears by the deadline, the leader continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError

from msgspec import Struct

from sequencer.raft.core.ports import TermState
from sequencer.raft.core.pysyncobj_adapter import now


class LeadershipTransfer(Struct):
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


class TransferWaiters:
    """Callers that wait for the result of a leadership transfer. For the loop's thread."""

    def __init__(self, name: str, raft: TermState, transfer: Callable[[float], None]) -> None:
        self._name, self._raft, self._transfer = name, raft, transfer
        self.waiting: list[tuple[float, Future[bool]]] = []
        """The deadline and the future of each caller. They are read in every round."""

    def start(self, timeout_s: float, done: Future[bool]) -> None:
        raft = self._raft
        if not raft.leads:
            _answer(done, raft.leader is not None)
            return
        until = now() + timeout_s
        self._transfer(until)
        self.waiting.append((until, done))

    def answer(self) -> None:
        """Complete the futures whose result is known."""
        leader, waiting = self._raft.leader, []
        for until, done in self.waiting:
            if leader not in {None, self._name}:
                _answer(done, True)
            elif self._raft.round_began >= until:
                _answer(done, False)
            else:
                waiting.append((until, done))
        self.waiting = waiting

    def due(self) -> float:
        return min((until for until, _ in self.waiting), default=float("inf"))


def _answer(done: Future[bool], is_so: bool) -> None:
    with contextlib.suppress(InvalidStateError):  # Its owner cancelled it.
        done.set_result(is_so)
