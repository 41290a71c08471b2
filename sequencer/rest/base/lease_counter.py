"""Counts of lease changes that this process applied since it started. Pure.

Commands that are applied again after a restart count again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sequencer.state.apply_result import LeasesExpired, LeasesGranted, Outcome


@dataclass(frozen=True, slots=True)
class LeaseCounter:
    granted: int = 0
    renewed: int = 0
    released: int = 0
    expired: int = 0

    def after(self, outcome: Outcome) -> LeaseCounter:
        """The counts after a command with this outcome."""
        match outcome:
            case LeasesGranted():
                return LeaseCounter(
                    self.granted + outcome.granted,
                    self.renewed + outcome.renewed,
                    self.released + outcome.released,
                    self.expired,
                )
            case LeasesExpired(names):
                return LeaseCounter(self.granted, self.renewed, self.released, self.expired + len(names))
            case _:
                return self


NO_LEASES: Final = LeaseCounter()
