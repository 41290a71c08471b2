"""How the mapper spreads streams over clusters, and which of them move when a cluster is added or removed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from rt.streams.core.stream_id import StreamId
from rt.streams.queue.mapper import VIRTUAL_NODES, PartitionedQueueMapper

DEVIATIONS: Final = 5
"""The bound of a measured share, in standard deviations. About one run in two million is outside the
bound.
"""
PROGRESS_EACH: Final = 250_000


class Placement(Struct, frozen=True):
    """Counts of streams. A cluster is added to `clusters` clusters; the removal is the way back."""

    streams_of: Counter[str]
    streams_of_more: Counter[str]
    """The streams of each cluster, with the added cluster."""
    moved: int
    moved_elsewhere: int
    """The streams that moved, but not to the added cluster."""


def cluster_names(count: int) -> list[str]:
    return [f"cluster-{index:04}" for index in range(count)]


def measure(clusters: int, streams: int, seed: int, progress: Callable[[str], None]) -> Placement:
    """Ask the product's mappers for the cluster of each stream. The names of streams depend on the seed."""
    names = cluster_names(clusters + 1)
    before, after = PartitionedQueueMapper(names[:-1]), PartitionedQueueMapper(names)
    counts, counts_more, moved, elsewhere = Counter[str](), Counter[str](), 0, 0
    for index in range(streams):
        stream = StreamId(f"simulated-{seed}", str(index))
        here, there = before.queue_for(stream).name, after.queue_for(stream).name
        counts[here] += 1
        counts_more[there] += 1
        if here != there:
            moved += 1
            elsewhere += there != names[-1]
        if index and not index % PROGRESS_EACH:
            progress(f"{index:,} streams placed")
    return Placement(counts, counts_more, moved, elsewhere)


def expected_share(clusters: int, streams: int) -> tuple[float, float]:
    """The share of streams that one more cluster takes, and how far the measured share may differ from it.

    The points are uniform on the ring, so the part of the ring that belongs to the P points of the new
    cluster among all (n + 1) P has the distribution Beta(P, n P): the mean is 1/(n + 1). The streams are a
    sample of the ring: their share has the variance p (1 - p) / streams in addition.
    """
    mean, points = 1 / (clusters + 1), (clusters + 1) * VIRTUAL_NODES
    variance = mean * (1 - mean) / (points + 1) + mean * (1 - mean) / streams
    return mean, DEVIATIONS * math.sqrt(variance)
