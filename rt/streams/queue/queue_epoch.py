"""The resets of a queue's log, and where stored positions continue after a forced reset. Pure.

After a soft or hard reset every position keeps its meaning. After a forced reset the log continues with the
messages that one node knew: positions that only the other nodes had merged get new messages. The run of the
log that starts with the reset shows where.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from rt.cluster_epoch import generation_of_number
from rt.net.lease_client import LogEpoch


class StoredEpoch(NamedTuple):
    """The epoch in which stored positions were correct. It is stored with them."""

    number: int
    forced: str
    """Identifies the last forced reset; empty if there was none."""

    @property
    def generation(self) -> int:
        return generation_of_number(self.number)


class QueueEpoch(Struct, frozen=True):
    """The epoch of a queue's log, and the end of the log, as a majority knows them."""

    log: LogEpoch
    end: int

    @property
    def stored(self) -> StoredEpoch:
        return StoredEpoch(self.log.number, self.log.forced.hex())

    def changed_from(self, stored: StoredEpoch | None, low: int | None) -> int | None:
        """Return the first position that may have another meaning than in epoch `stored`. None if all
        positions have the same meaning.

        `low`: the position up to which the log was read in that epoch. If no epoch was stored, all positions
        since the first forced reset are suspect. If the log ends before `low` without a further forced reset,
        the positions since the last forced reset are suspect.
        """
        is_shorter = low is not None and low > self.end
        now = self.stored
        if stored is None and now.forced:
            return self._begin_of(1)
        if stored is None or stored.forced == now.forced:
            return self._begin_of(now.generation) if is_shorter else None
        if now.generation > stored.generation:
            return self._begin_of(stored.generation + 1)
        return self._begin_of(now.generation)

    def _begin_of(self, generation: int) -> int:
        """The position at which the log of this generation of forced resets, and of later ones, starts."""
        if not generation:
            return 0
        found = (first for run, first in self.log.runs.items() if generation_of_number(run) >= generation)
        return min(found, default=0)
