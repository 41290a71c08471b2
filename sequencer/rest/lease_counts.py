"""What became of leases since this process began, as it applied it. Pure.

What a process applies again when it begins is counted again: a counter begins with the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sequencer.outcomes import Expired, Leased, Outcome


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    """Counts, of one lease each."""

    granted: int = 0
    renewed: int = 0
    released: int = 0
    expired: int = 0

    def after(self, outcome: Outcome) -> LeaseCounts:
        """With what a command did."""
        match outcome:
            case Leased():
                return LeaseCounts(
                    self.granted + outcome.granted,
                    self.renewed + outcome.renewed,
                    self.released + outcome.released,
                    self.expired,
                )
            case Expired(names):
                return LeaseCounts(self.granted, self.renewed, self.released, self.expired + len(names))
            case _:
                return self


NO_LEASES: Final = LeaseCounts()
