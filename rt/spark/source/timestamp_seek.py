"""Finds the first position with a timestamp at or after a given one.

The outline's timestamps are used only to skip; the answer is read and verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np

from rt.log.read.projection import Projection
from rt.log.read.range_reader import LossHandler
from rt.log.read.waypoint import Waypoint
from rt.spark.source.log_source import LogSource
from rt.spark.source.partitioner import PositionRange


def first_at(log: LogSource, start: int, end: int, timestamp_ns: int, on_loss: LossHandler) -> int:
    """The first position from `start` to `end` with a timestamp at or after `timestamp_ns`, else `end`."""
    interest = Projection(values=False, timestamp_low_ns=timestamp_ns)
    for part in _parts(log.outline(start, end), start, end, timestamp_ns):
        for batch in log.read(part.start, part.end, interest, on_loss):
            at = np.flatnonzero(batch.timestamps_ns >= timestamp_ns)
            if len(at):
                return int(batch.positions[at[0]])
    return end


def _parts(waypoints: Iterator[Waypoint], start: int, end: int, timestamp_ns: int) -> Iterator[PositionRange]:
    """The ranges that may hold such a timestamp, in order."""
    for before, after in pairwise(chain([Waypoint(start, 0)], waypoints)):
        low, high = max(before.position, start), min(after.position, end)
        if low < high and (after.timestamp_high_ns is None or after.timestamp_high_ns >= timestamp_ns):
            yield PositionRange(low, high)
