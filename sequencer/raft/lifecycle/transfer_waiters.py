"""Who waits to hear whether leadership was handed over. `handover` is how that goes.

For the loop's thread.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError

from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.pysyncobj_adapter import now


class TransferWaiters:
    """Answers as soon as another member leads, and when the time is over."""

    def __init__(self, name: str, raft: SyncObj) -> None:
        self._name, self._raft = name, raft
        self.waiting: list[tuple[float, Future[bool]]] = []
        """Until when each waits; for reading, as it is looked at in every round."""

    def begin(self, timeout_s: float, done: Future[bool]) -> None:
        """See `Consensus.hand_over`; `done` gets the answer."""
        raft = self._raft
        if not raft.leads:
            _answer(done, raft.leader is not None)
            return
        until = now() + timeout_s
        raft.hand_over(until)
        self.waiting.append((until, done))

    def settle(self) -> None:
        """Answer whoever can be answered now."""
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
        """When the first one's time is over."""
        return min((until for until, _ in self.waiting), default=float("inf"))


def _answer(done: Future[bool], is_so: bool) -> None:
    with contextlib.suppress(InvalidStateError):  # Given up by its owner.
        done.set_result(is_so)
