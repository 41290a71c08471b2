"""Counts of the trims and lease changes that this process applied since it started. Pure.

Commands that are applied again after a restart count again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rt.log.format.segment_table import TrimReason
from sequencer.state.apply_result import LeasesExpired, LeasesGranted, Outcome, SegmentsTrimmed


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
        reason = outcome.reason
        segments = self.segments.get(reason, 0) + outcome.segments
        size_bytes = self.size_bytes.get(reason, 0) + outcome.size_bytes
        return TrimCounter(
            {**self.segments, reason: segments},
            {**self.size_bytes, reason: size_bytes},
            self.overridden + len(outcome.overridden),
        )


@dataclass(frozen=True, slots=True)
class LeaseCounter:
    granted: int = 0
    renewed: int = 0
    released: int = 0
    expired: int = 0

    def after(self, outcome: Outcome) -> LeaseCounter:
        """The counts after a command with this outcome."""
        match outcome:
            case LeasesGranted(granted=granted, renewed=renewed, released=released):
                return LeaseCounter(
                    self.granted + granted, self.renewed + renewed, self.released + released, self.expired
                )
            case LeasesExpired(names):
                return replace(self, expired=self.expired + len(names))
            case _:
                return self
