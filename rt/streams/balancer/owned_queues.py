"""The leases that a host owns: its own host lease, and the leases of the queues that it serves. Pure: times
are passed in.

Invariants:
- A lease that expired by the clock is never reported as owned, even if everything else hangs.
- A lost queue is not acquired again before its work here has stopped, or has failed to stop in time.
- A lease of this owner that is not recorded here was acquired without notice.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from rt.streams.balancer.balancer import Fence
from rt.streams.balancer.lease import LeaseHolder, OwnedLease
from rt.streams.core.stream_id import QueueId


class QueueOwnership(Struct, eq=False):
    """A queue's lease. `is_leaving`: it is being given up. `is_released`: it must not be renewed."""

    lease: OwnedLease
    is_leaving: bool = False
    is_released: bool = False


class OwnedQueues:
    """The leases of one host. A lease is valid until `margin_s` before its end."""

    def __init__(self, margin_s: float) -> None:
        self._margin_s = margin_s
        self.host_lease: OwnedLease | None = None
        """The lease of this host's name."""
        self.queues: dict[QueueId, QueueOwnership] = {}
        """In the order in which they were won."""
        self._stopping: dict[QueueId, OwnedLease] = {}
        """The leases of lost queues whose work here may still run."""
        self._left: set[tuple[str, int]] = set()
        """The names and tokens of leases whose queues failed to stop in time: these leases must expire."""

    def served(self, now_s: float) -> dict[QueueId, Fence]:
        return {
            queue: Fence(right.lease.token)
            for queue, right in self.queues.items()
            if not right.is_released and not self.is_over(right.lease, now_s)
        }

    def is_over(self, lease: OwnedLease, now_s: float) -> bool:
        return lease.until_s - self._margin_s <= now_s

    def valid_until_s(self, queue: QueueId) -> float | None:
        """The time until which the queue may be served here, unless its lease is renewed. None if it may not
        be served.
        """
        right = self.queues.get(queue)
        return None if right is None or right.is_released else right.lease.until_s - self._margin_s

    def kept(self) -> list[QueueId]:
        """The queues that are not being given up."""
        return [queue for queue, right in self.queues.items() if not right.is_leaving]

    def renewable(self) -> list[tuple[QueueId, QueueOwnership]]:
        return [(queue, right) for queue, right in self.queues.items() if not right.is_released]

    def may_take(self, queue: QueueId) -> bool:
        """Whether nothing of the queue is owned or may still run here."""
        return queue not in self.queues and queue not in self._stopping

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the first lease is no longer valid; None: there is none."""
        ends = [right.lease.until_s for right in self.queues.values()]
        if self.host_lease is not None:
            ends.append(self.host_lease.until_s)
        return min(ends) - self._margin_s - now_s if ends else None

    def expired(self, now_s: float) -> list[QueueId]:
        """The queues whose leases have expired. Also drops the host lease if it has expired."""
        if self.host_lease is not None and self.is_over(self.host_lease, now_s):
            self.host_lease = None
        return [queue for queue, right in self.queues.items() if self.is_over(right.lease, now_s)]

    def lose(self, queue: QueueId) -> None:
        """Record that the queue is lost and its work must stop. `on_stopped` follows."""
        self._stopping[queue] = self.queues.pop(queue).lease

    def on_stopped(self, queue: QueueId, *, has_stopped: bool) -> None:
        """Record whether a lost queue's work has stopped, or failed to stop in time."""
        lease = self._stopping.pop(queue)
        if not has_stopped:
            self._left.add((lease.name, lease.token))

    def unknown(self, rows: Mapping[str, LeaseHolder], owner: str) -> list[OwnedLease]:
        """The leases of this owner in `rows` that are not recorded here."""
        leases = [*(right.lease for right in self.queues.values()), *self._stopping.values()]
        if self.host_lease is not None:
            leases.append(self.host_lease)
        known = {(lease.name, lease.token) for lease in leases} | self._left
        return [
            OwnedLease(name, row.token, 0.0, 0.0)
            for name, row in rows.items()
            if row.owner == owner and (name, row.token) not in known
        ]
