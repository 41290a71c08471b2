"""The figures of the demo: latency, throughput, and the pauses at a failover.

All times are ns since the Unix epoch. They can be compared because all processes run on one machine and read
one clock.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec import Struct

from rt.log.check.status import read_status
from rt.log.disk import REAL
from rt.log.format.constants import Int64s
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_header, scans
from rt.log.scan.scanner import MergedScanner
from rt.units import NS_PER_S


class Latency(Struct, frozen=True):
    """How long `count` messages took from `publish` to the subscriber."""

    count: int
    p50_ms: float
    p99_ms: float


class Burst(Struct, frozen=True):
    """Messages published at full speed, and the seconds until the subscriber had received all."""

    count: int
    value_bytes: int
    seconds: float


class Failover(Struct, frozen=True):
    """How long the stream paused after the leader `killed` was killed and `took_over` led.

    `unmerged_s` is the longest time in which no block was merged, `unread_s` is the longest time in which the
    subscriber received nothing.
    """

    killed: str
    took_over: str
    unmerged_s: float
    unread_s: float


class DeliveryTimes(Struct, frozen=True):
    """When each message was published and when the subscriber received it, in the order of the merged log."""

    published_ns: Int64s
    arrived_ns: Int64s

    @classmethod
    def load(cls, path: Path) -> DeliveryTimes:
        """Read the file that the demo's subscriber wrote: both rows, in NumPy's format."""
        published, arrived = np.load(path)
        return cls(published, arrived)

    def latency(self, start_ns: int, end_ns: int) -> Latency | None:
        """The latency of the messages published in [start_ns, end_ns); None if there are none."""
        rows = (self.published_ns >= start_ns) & (self.published_ns < end_ns)
        if not rows.any():
            return None
        taken_ms = (self.arrived_ns[rows] - self.published_ns[rows]) / 1e6
        p50, p99 = np.percentile(taken_ms, [50, 99])
        return Latency(len(taken_ms), float(p50), float(p99))


def longest_pause_s(times_ns: Int64s, start_ns: int, end_ns: int) -> float:
    """The longest time without an event from `start_ns` to `end_ns`. The events' `times_ns` need no order."""
    inside = np.sort(times_ns[(times_ns > start_ns) & (times_ns < end_ns)])
    return float(np.diff(inside, prepend=start_ns, append=end_ns).max()) / NS_PER_S


def sequenced_ns(directory: Path) -> Int64s:
    """When the leader sequenced each block of a merged log, without the trimmed ones."""
    found: list[int] = []
    path = str(directory)
    for segment in read_status(path).kept:
        header = read_header(REAL, path, segment.id)
        assert header is not None, segment
        file = REAL.open(segment_path(path, segment.id))
        try:
            for scan in scans(file.pread, MergedScanner(header), values=False):
                found += [placed.header.sequenced_ns for placed in scan.blocks]
        finally:
            file.close()
    return np.array(found, np.int64)
