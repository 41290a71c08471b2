"""Counts of trims that this process applied since it started. Pure.

Commands that are applied again after a restart count again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rt.log.format.segment_table import TrimReason
from sequencer.state.apply_result import Outcome, SegmentsTrimmed


@dataclass(frozen=True, slots=True)
class TrimCounter:
    segments: Mapping[TrimReason, int] = field(default_factory=dict)
    size_bytes: Mapping[TrimReason, int] = field(default_factory=dict)
    overridden: int = 0
    """Holds overridden by trims; each hold counts once per trim."""

    def after(self, outcome: Outcome) -> TrimCounter:
        """The counts after a command with this outcome."""
        if not isinstance(outcome, SegmentsTrimmed):
            return self
        return TrimCounter(
            _plus(self.segments, outcome.reason, outcome.segments),
            _plus(self.size_bytes, outcome.reason, outcome.size_bytes),
            self.overridden + len(outcome.overridden),
        )


def _plus(counts: Mapping[TrimReason, int], reason: TrimReason, more: int) -> Mapping[TrimReason, int]:
    return {**counts, reason: counts.get(reason, 0) + more}


NO_TRIMS: Final = TrimCounter()
