"""How long things take with a balancer that serves under leases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from rt.errors import InvalidOption

LEASE_S_MIN: Final = 1.0
LEASE_S_MAX: Final = 3600.0


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """A dead host's queues are served again after `lease_s`, `look_s` and a bit."""

    lease_s: float = 30.0
    """A lease lasts so long without a renewal; it is renewed three times meanwhile."""
    look_s: float = 2.0
    """Between looks at who is there."""
    give_up_s: float = 20.0
    """Most that a listener may take to stop a queue: above its own bound, `drain_s`."""

    def __post_init__(self) -> None:
        is_possible = LEASE_S_MIN <= self.lease_s <= LEASE_S_MAX and 0 < self.look_s <= self.lease_s
        if not is_possible or not 0 < self.give_up_s < math.inf:
            raise InvalidOption("times of a balancer that cannot be", got=str(self), hint="See LeaseTimes.")

    @property
    def renew_s(self) -> float:
        """Between renewals."""
        return self.lease_s / 3

    @property
    def margin_s(self) -> float:
        """So long before a lease ends it is counted on no more: what runs is to stop until then."""
        return self.lease_s / 10


DEFAULT_TIMES: Final = LeaseTimes()
