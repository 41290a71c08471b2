"""Values that a consumer may request again, with dense ids. The slowest consumer decides what is deleted.

    acknowledged by all        kept                     next
    0 … low - 1                low … end - 1            end …

Invariants:
- The id of a value is its ordinal from 0. It is the same after a recovery, because `low` and the values are
  saved together.
- `low` only grows.
- A value is dropped when every consumer acknowledged it. For a new consumer, all values that are kept at that
  time stay. Without consumers nothing is dropped.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, Generic, TypeVar

from rt.objects import PersistedQueue
from rt.query.core.errors import NotInBuffer

T = TypeVar("T")


class ReplayBuffer(Generic[T]):
    """`acknowledged`: by consumer, the last id that it acknowledged."""

    def __init__(
        self, held: PersistedQueue[T], *, low: int = 0, acknowledged: dict[str, int] | None = None
    ) -> None:
        self._held: Final = held
        self._low = low
        self._acknowledged: dict[str, int] = {}
        for consumer, sequence_id in (acknowledged or {}).items():
            self._acknowledged[consumer] = max(low - 1, sequence_id)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def low(self) -> int:
        """The first kept id."""
        return self._low

    @property
    def end(self) -> int:
        """The id of the next value."""
        return self._low + len(self._held)

    @property
    def consumers(self) -> dict[str, int]:
        """By consumer, the last id that it acknowledged."""
        return dict(self._acknowledged)

    def append(self, value: T) -> int:
        """Keep a value. Returns its id."""
        self._held.enqueue(value)
        return self.end - 1

    def join(self, consumer: str) -> None:
        """Keep all present and later values for a consumer. Does nothing if it is known."""
        self._acknowledged.setdefault(consumer, self._low - 1)

    def leave(self, consumer: str) -> None:
        """Stop keeping values for a consumer. Does nothing if it is unknown."""
        if self._acknowledged.pop(consumer, None) is not None and self._acknowledged:
            self._prune()

    def acknowledge(self, consumer: str, sequence_id: int) -> None:
        """Take note that values up to this id, inclusive, are durable at the consumer.

        `NotInBuffer` if the id is `end` or greater.
        """
        if sequence_id >= self.end:
            raise NotInBuffer(
                "acknowledged an id that was never sent",
                where=consumer,
                got=sequence_id,
                expected=f"below {self.end}",
            )
        if consumer not in self._acknowledged:
            raise NotInBuffer("acknowledged without a subscription", where=consumer, got=sequence_id)
        if sequence_id > self._acknowledged[consumer]:
            self._acknowledged[consumer] = sequence_id
            self._prune()

    def resume(self, consumer: str) -> int:
        """The id after the last one that the consumer acknowledged."""
        return self._acknowledged[consumer] + 1

    def check_start(self, sequence_id: int) -> None:
        """`NotInBuffer` unless the values from this id on can be sent. The id may be `end`."""
        if not self._low <= sequence_id <= self.end:
            raise NotInBuffer(
                "cannot start at this id",
                got=sequence_id,
                expected=f"{self._low} to {self.end}",
                hint="Start with RESUME to continue after the last acknowledgement.",
            )

    def read(self, start: int, end: int) -> list[T]:
        """The values with ids in [start, end), which must be kept. The cost is proportional to the number of
        values from `start` on.
        """
        assert self._low <= start <= end <= self.end, (start, end, self._low, self.end)
        found = list(islice(reversed(self._held), self.end - end, self.end - start))
        found.reverse()
        return found

    def _prune(self) -> None:
        low = min(self._acknowledged.values()) + 1
        for _ in range(self._low, low):
            self._held.dequeue()
        self._low = max(self._low, low)
