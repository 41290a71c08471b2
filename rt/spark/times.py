"""Where in a log a time is: the first position whose timestamp is at or above it.

The outline's timestamps are believed as far as they spare reading; the answer itself is read and verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np

from rt.log.interest import Interest
from rt.log.ranges import LossHandler
from rt.log.waypoints import Waypoint
from rt.spark.log_source import LogSource
from rt.spark.planning import Part


def first_at(log: LogSource, start: int, end: int, timestamp_ns: int, on_loss: LossHandler) -> int:
    """The first position between `start` and `end` of a timestamp at or above `timestamp_ns`, else `end`."""
    interest = Interest(values=False, timestamp_low_ns=timestamp_ns)
    for part in _parts(log.outline(start, end), start, end, timestamp_ns):
        for batch in log.read(part.start, part.end, interest, on_loss):
            at = np.flatnonzero(batch.timestamps_ns >= timestamp_ns)
            if len(at):
                return int(batch.positions[at[0]])
    return end


def _parts(waypoints: Iterator[Waypoint], start: int, end: int, timestamp_ns: int) -> Iterator[Part]:
    """The parts that may hold such a timestamp, in order."""
    for before, behind in pairwise(chain([Waypoint(start, 0)], waypoints)):
        low, high = max(before.position, start), min(behind.position, end)
        if low < high and (behind.timestamp_high_ns is None or behind.timestamp_high_ns >= timestamp_ns):
            yield Part(low, high)
