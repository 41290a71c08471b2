"""The failed tries of a delivery: how many, for how long, and how many events to deliver next.

Invariant: after a failure events are retried one at a time, to find the one that fails.
"""

from __future__ import annotations

from rt.streams.core.stream_id import SequenceToken


class RetryState:
    """The retries of one consumer. It gets up to `events_max` events at a time while deliveries succeed."""

    __slots__ = ("_at", "_events_max", "_since", "count", "events")

    def __init__(self, events_max: int) -> None:
        self._events_max = events_max
        self._at: SequenceToken | None = None
        self._since = 0.0
        self.events = events_max
        """How many events to deliver next."""
        self.count = 0
        """Consecutive failed tries at the same position."""

    @property
    def are_failing(self) -> bool:
        """Whether the last try failed."""
        return self._at is not None

    def succeeded(self) -> None:
        self._at = None
        self.events = min(2 * self.events, self._events_max)

    def failed(self, at: SequenceToken, now: float) -> float:
        """Record a failure. Returns the seconds since the first failure at this position."""
        if self._at != at:
            self._at, self._since, self.count = at, now, 0
        self.count += 1
        self.events = 1
        return now - self._since

    def passed_over(self) -> None:
        """The failed event was resolved by the policy."""
        self._at = None
