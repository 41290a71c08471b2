"""Which leases are over: how long each was seen without a renewal, by the leader's own clock.

Pure; the clock never goes back, and is no wall clock: those of all nodes may jump, and no lease is shorter
for it. The law: a lease is over at the earliest when its duration has passed since this leader first saw it
as it is. So a leader that comes new gives every lease its whole time once more; and an owner may count on its
lease for its duration from when it *began to ask* for it, by its own clock.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from sequencer.state.lease_commands import LEASES_PER_COMMAND_MAX, ExpireLeases, IdleLease
from sequencer.state.state import SequencerState

LOOK_NS: Final = 250 * 10**6
"""How often it looks: a lease may last so much longer, twice over."""
_MS: Final = 10**6


class LeaseExpiry:
    """What one leader saw of leases, in one term."""

    def __init__(self, state: SequencerState) -> None:
        self.state = state
        self._seen: dict[str, tuple[int, int, int]] = {}
        """By name: token, renewals, and since when they are so."""
        self._look_ns = 0

    def due(self, now_ns: int) -> ExpireLeases | None:
        """What is over; None: nothing, or it is not time to look. It is said again until it is applied."""
        if now_ns < self._look_ns or not (self.state.leases or self._seen):
            return None
        self._look_ns = now_ns + LOOK_NS
        seen, self._seen = self._seen, {}
        over: list[IdleLease] = []
        for name, lease in self.state.leases.items():
            known = seen.get(name)
            if known is None or known[:2] != (lease.token, lease.renewals):
                known = (lease.token, lease.renewals, now_ns)
            self._seen[name] = known
            if now_ns - known[2] >= lease.duration_ms * _MS:
                over.append(IdleLease(name, lease.token, lease.renewals))
        return ExpireLeases(tuple(islice(over, LEASES_PER_COMMAND_MAX))) if over else None
