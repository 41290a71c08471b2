"""How often a consumer was handed what it does not take, for how long, and how much it is handed next.

Law: what was not taken is tried again one event at a time, so that the one that is to blame is found.
"""

from __future__ import annotations

from rt.streams.ids import SequenceToken


class Tries:
    """Of one consumer, who is handed `events_max` events at a time when all goes well."""

    __slots__ = ("_at", "_events_max", "_since", "count", "events")

    def __init__(self, events_max: int) -> None:
        self._events_max = events_max
        self._at: SequenceToken | None = None
        self._since = 0.0
        self.events = events_max
        """How many to hand out next."""
        self.count = 0
        """Of the tries that failed one after the other, at the same place."""

    @property
    def are_failing(self) -> bool:
        """Whether the last one failed."""
        return self._at is not None

    def succeeded(self) -> None:
        """It was taken."""
        self._at = None
        self.events = min(2 * self.events, self._events_max)

    def failed(self, at: SequenceToken, now: float) -> float:
        """It was not; for how many seconds by now."""
        if self._at != at:
            self._at, self._since, self.count = at, now, 0
        self.count += 1
        self.events = 1
        return now - self._since

    def passed_over(self) -> None:
        """What it did not take is dealt with."""
        self._at = None
