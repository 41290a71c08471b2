"""What a host counts on by its leases: its place among the hosts, and the queues that it serves.

Pure: times come in. Laws. A right that is over by the clock is named no more, whatever else stands still. A
queue that was lost is not won again before what ran of it here has stopped, or will never say so. A lease of
this owner that is in none of these books was got without being noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rt.streams.balancing import Fence
from rt.streams.ids import QueueId
from rt.streams.leasing import Holder, Lease


@dataclass(slots=True, eq=False)
class Right:
    """A queue's lease. `is_leaving`: it is being given up; `is_let_go`: it must not be renewed any more."""

    lease: Lease
    is_leaving: bool = False
    is_let_go: bool = False


class Rights:
    """Of one host. A lease is counted on until `margin_s` before its end."""

    def __init__(self, margin_s: float) -> None:
        self._margin_s = margin_s
        self.place: Lease | None = None
        """The lease of this host's name."""
        self.queues: dict[QueueId, Right] = {}
        """In the order in which they were won."""
        self._stopping: dict[QueueId, int] = {}
        """Tokens of queues that were lost, and are not known to have stopped here yet."""
        self._left: set[int] = set()
        """Tokens of those that never said that they stopped: their leases must lapse."""

    def served(self, now_s: float) -> dict[QueueId, Fence]:
        """The queues that may be served now."""
        return {
            queue: Fence(right.lease.token)
            for queue, right in self.queues.items()
            if not right.is_let_go and not self._is_over(right.lease, now_s)
        }

    def kept(self) -> list[QueueId]:
        """Those that are not about to go."""
        return [queue for queue, right in self.queues.items() if not right.is_leaving]

    def renewable(self) -> list[tuple[QueueId, Right]]:
        """Those whose leases are to last."""
        return [(queue, right) for queue, right in self.queues.items() if not right.is_let_go]

    def may_take(self, queue: QueueId) -> bool:
        """Whether nothing of the queue is, or may be, here."""
        return queue not in self.queues and queue not in self._stopping

    def left_s(self, now_s: float) -> float | None:
        """How long the first of the leases can yet be counted on; None: there is none."""
        ends = [right.lease.until_s for right in self.queues.values()]
        if self.place is not None:
            ends.append(self.place.until_s)
        return min(ends) - self._margin_s - now_s if ends else None

    def over(self, now_s: float) -> list[QueueId]:
        """The queues that are to be lost; the place is, if its time is over."""
        if self.place is not None and self._is_over(self.place, now_s):
            self.place = None
        return [queue for queue, right in self.queues.items() if self._is_over(right.lease, now_s)]

    def lose(self, queue: QueueId) -> None:
        """It is this host's no more, and what runs of it is to stop: `on_stopped` says when."""
        self._stopping[queue] = self.queues.pop(queue).lease.token

    def on_stopped(self, queue: QueueId, *, has_stopped: bool) -> None:
        """What was lost has stopped, or never said so."""
        token = self._stopping.pop(queue)
        if not has_stopped:
            self._left.add(token)

    def unknown(self, rows: Mapping[str, Holder], owner: str) -> list[Lease]:
        """Of the leases that are held those of this owner that nobody here knows of."""
        known = {right.lease.token for right in self.queues.values()}
        known |= {*self._stopping.values(), *self._left}
        if self.place is not None:
            known.add(self.place.token)
        return [
            Lease(name, row.token, 0.0, 0.0)
            for name, row in rows.items()
            if row.owner == owner and row.token not in known
        ]

    def _is_over(self, lease: Lease, now_s: float) -> bool:
        return lease.until_s - self._margin_s <= now_s
