"""What was trimmed of the merged log since this process began, as it applied it. Pure.

What a process applies again when it begins is counted again: a counter begins with the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rt.log.table import TrimReason
from sequencer.outcomes import Outcome, Trimmed


@dataclass(frozen=True, slots=True)
class Trims:
    """Counts."""

    segments: Mapping[TrimReason, int] = field(default_factory=dict)
    size_bytes: Mapping[TrimReason, int] = field(default_factory=dict)
    overridden: int = 0
    """Holds that did not keep what they held, once for each trim."""

    def after(self, outcome: Outcome) -> Trims:
        """With what a command did."""
        if not isinstance(outcome, Trimmed):
            return self
        return Trims(
            _plus(self.segments, outcome.reason, outcome.segments),
            _plus(self.size_bytes, outcome.reason, outcome.size_bytes),
            self.overridden + len(outcome.overridden),
        )


def _plus(counts: Mapping[TrimReason, int], reason: TrimReason, more: int) -> Mapping[TrimReason, int]:
    return {**counts, reason: counts.get(reason, 0) + more}


NO_TRIMS: Final = Trims()
