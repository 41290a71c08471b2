"""Decides which leases have expired: the leader's own clock measures the time since their last renewal.

Pure. The clock is monotonic: a jump of the nodes' wall clocks shortens no lease. Invariant: a lease does not
expire before its duration has passed since this leader first saw its current token and renewals. So a new
leader gives every lease its whole duration again. An owner may rely on its lease for its duration, counted by
its own clock from when it *sent* the request.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from sequencer.state.leases.leases import LEASES_PER_COMMAND_MAX, ExpireLeases, IdleLease
from sequencer.state.state import SequencerState

POLL_NS: Final = 250 * 10**6
"""How often leases are checked. A lease may last up to twice this time longer."""
_MS: Final = 10**6


class LeaseExpiry:
    """The leases as one leader saw them, in one term."""

    def __init__(self, state: SequencerState) -> None:
        self.state = state
        self._seen: dict[str, tuple[int, int, int]] = {}
        """By name: token, renewals, and when this leader first saw both."""
        self._poll_ns = 0

    def due(self, now_ns: int) -> ExpireLeases | None:
        """The expired leases; None if there are none or no check is due. Repeated until they are applied."""
        if now_ns < self._poll_ns or not (self.state.leases or self._seen):
            return None
        self._poll_ns = now_ns + POLL_NS
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
