"""The resets of a queue's log, and where stored positions continue after a forced one. Pure.

After a soft or hard reset every position keeps its meaning. After a forced one the log continues with what
one node knew: positions that only the other nodes had merged get new messages. The run of the log that begins
then says where.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from rt.cluster_epoch import generation_of_number
from rt.net.lease_client import LogEpoch


class StoredEpoch(NamedTuple):
    """What is stored with positions: the epoch in which they were right."""

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
        """The first position that may have another meaning than in epoch `stored`; None if all have the same.

        `low`: how far the log was read then. If no epoch was stored, all positions since the first forced
        reset are suspect. If the log ends before `low` without a forced reset, those since the last one.
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
        """Where the log of this generation of forced resets, and of later ones, begins."""
        if not generation:
            return 0
        found = (first for run, first in self.log.runs.items() if generation_of_number(run) >= generation)
        return min(found, default=0)
