"""Values that a consumer may ask for again: a buffer with dense ids, pruned by the slowest acknowledgement.

    acknowledged by all        kept                     to come
    0 … low - 1                low … end - 1            end …

Laws. The id of a value is its place, from 0: it is the same after a recovery, as `low` and the values are
saved together. `low` never goes back. A value is dropped when every consumer has acknowledged it; one that
joins pins all that is kept, and where there is none, nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar

from rt.query.errors import NotInBuffer, QueryExists

T = TypeVar("T")


class Held(Protocol[T]):
    """What holds the values: a `PersistedQueue`."""

    def __len__(self) -> int: ...
    def __reversed__(self) -> Iterator[T]: ...

    def enqueue(self, value: T, /) -> None:
        """Add at the end."""

    def dequeue(self) -> T:
        """Take the first."""


class ReplayBuffer(Generic[T]):
    """See the module. `acknowledged`: of each consumer, the last id that it acknowledged."""

    def __init__(self, held: Held[T], *, low: int = 0, acknowledged: dict[str, int] | None = None) -> None:
        self._held: Final = held
        self._low = low
        self._acknowledged: dict[str, int] = {}
        for consumer, sequence_id in (acknowledged or {}).items():
            self._acknowledged[consumer] = max(low - 1, sequence_id)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def low(self) -> int:
        """The first id that is kept."""
        return self._low

    @property
    def end(self) -> int:
        """The id of the next value."""
        return self._low + len(self._held)

    @property
    def consumers(self) -> dict[str, int]:
        """Of each consumer, the last id that it acknowledged."""
        return dict(self._acknowledged)

    def append(self, value: T) -> int:
        """Take a value; its id."""
        self._held.enqueue(value)
        return self.end - 1

    def join(self, consumer: str) -> None:
        """Keep for a consumer, if it is a new one, all there is."""
        self._acknowledged.setdefault(consumer, self._low - 1)

    def leave(self, consumer: str) -> None:
        """Keep nothing for it any more. Nothing if it is unknown."""
        if self._acknowledged.pop(consumer, None) is not None and self._acknowledged:
            self._prune()

    def acknowledge(self, consumer: str, sequence_id: int) -> None:
        """Everything up to that id, inclusive, is durable at a consumer. `NotInBuffer` beyond the end."""
        if sequence_id >= self.end:
            raise NotInBuffer(
                "an acknowledgement of what was never sent",
                where=consumer,
                got=sequence_id,
                wanted=f"below {self.end}",
            )
        if consumer not in self._acknowledged:
            raise NotInBuffer("an acknowledgement by nobody who subscribed", where=consumer, got=sequence_id)
        if sequence_id > self._acknowledged[consumer]:
            self._acknowledged[consumer] = sequence_id
            self._prune()

    def resume(self, consumer: str) -> int:
        """The id behind what a consumer acknowledged last."""
        return self._acknowledged[consumer] + 1

    def check_start(self, sequence_id: int) -> None:
        """`NotInBuffer` unless values from there on can be sent; the end can."""
        if not self._low <= sequence_id <= self.end:
            raise NotInBuffer(
                "a start where the buffer has nothing",
                got=sequence_id,
                wanted=f"{self._low} to {self.end}",
                hint="Start with RESUME to go on behind the last acknowledgement.",
            )

    def read(self, start: int, end: int) -> list[T]:
        """The values with ids in [start, end), which must be kept. Costs what lies behind `start`."""
        assert self._low <= start <= end <= self.end, (start, end, self._low, self.end)
        found = list(islice(reversed(self._held), self.end - end, self.end - start))
        found.reverse()
        return found

    def _prune(self) -> None:
        low = min(self._acknowledged.values()) + 1
        for _ in range(self._low, low):
            self._held.dequeue()
        self._low = max(self._low, low)


def check_consumer(known: Any, name: str) -> None:
    """`QueryExists` where a consumer of that name is attached already."""
    if name in known:
        raise QueryExists("a consumer of that name is there", got=repr(name), hint="Dispose of it first.")
