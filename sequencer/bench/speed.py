"""Throughput and latency of the transport, and its fairness to many publishers.

Throughput is what a majority of the nodes has merged in the measured time. It is sustained, because
publishers stay within `LEAD_BYTES` of what is merged. Latency is from `publish` to the subscriber.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Final

import numpy as np

from rt.bench.measure import Figure
from sequencer.bench.stage import Setup

LEAD_BYTES: Final = 64 << 20
MB_GOALS: Final = {1024: 120.0}
"""Value bytes merged a second, by the size of messages."""
MESSAGE_GOALS: Final = {128: 400_000.0}
_WARM_UP_S: Final = 3.0
_POLL_S: Final = 0.1


def throughput(
    setup: Setup, *, publishers: int, value_bytes: Sequence[int], seconds: float
) -> Iterator[Figure]:
    """Merged and received bytes by message size, with CPU time and memory."""
    for size in value_bytes:
        with setup.open() as stage:
            stage.start_publishers(publishers, size)
            stage.start_subscriber()
            stage.ask("flood", lead_bytes=LEAD_BYTES // publishers)
            time.sleep(_WARM_UP_S)
            stage.wait_for(lambda: stage.progress().received, 1, "the subscriber receives")
            before, begun = stage.progress(), time.monotonic()
            time.sleep(seconds)
            stage.wait_for(lambda: stage.progress().majority, before.majority + 1, "more is merged")
            after, lasted_s = stage.progress(), time.monotonic() - begun
            peak_mb = stage.peak_mb()
        name = f"{setup.nodes} nodes, {publishers} publishers of {size} B"
        count = after.majority - before.majority
        mb, received_mb = (messages * size / 1e6 for messages in (count, after.received - before.received))
        yield Figure(f"{name}: merged on a majority", (mb / lasted_s,), "MB/s", MB_GOALS.get(size))
        yield Figure(f"{name}: messages", (count / lasted_s,), "messages/s", MESSAGE_GOALS.get(size))
        yield Figure(f"{name}: received by a subscriber", (received_mb / lasted_s,), "MB/s")
        for who, used_s in after.cpu_s.items():
            per_gb = (used_s - before.cpu_s[who]) / max(mb, 1e-9) * 1000
            yield Figure(f"{name}: CPU of {who}", (per_gb,), "s/GB")
        yield Figure(f"{name}: most memory of a node process", (peak_mb,), "MB")


def latency(setup: Setup, *, rate_hz: float, seconds: float) -> Iterator[Figure]:
    with setup.open() as stage:
        stage.start_publishers(1, 1024)
        stage.start_subscriber()
        stage.ask("drip", rate_hz=rate_hz)
        time.sleep(_WARM_UP_S)
        stage.subscriber.ask("forget")
        time.sleep(seconds)
        latencies_ns: list[int] = []
        while not latencies_ns:  # On a busy machine the first message may take longer.
            stage.nodes.check_alive()
            time.sleep(_POLL_S)
            latencies_ns = stage.subscriber.ask("latencies")["ns"]
    latencies_ms = np.array(latencies_ns) / 1e6
    name = f"{setup.nodes} nodes, 1 KiB at {rate_hz:g} messages/s: publish to subscriber"
    for percent, goal in ((50, 5.0), (99, 25.0)):
        yield Figure(f"{name}, p{percent}", (float(np.percentile(latencies_ms, percent)),), "ms", goal)


def many(setup: Setup, *, publishers: int, seconds: float) -> Iterator[Figure]:
    """Whether publishers that all send at full speed get equal shares."""
    with setup.open() as stage:
        stage.start_publishers(publishers, 1024)
        # On few busy cores the push processes start slowly. That does not count here.
        stage.ask("fill", size_bytes=1)
        stage.wait_for(lambda: sum(map(bool, stage.merged())), publishers, "publishers that flow")
        stage.ask("flood", lead_bytes=LEAD_BYTES // publishers)
        time.sleep(_WARM_UP_S)
        before, begun = stage.merged(), time.monotonic()
        pauses = Pauses(list(before), [begun] * publishers)
        while (now := time.monotonic()) < begun + seconds:
            pauses.add(stage.merged(), now)
            time.sleep(_POLL_S)
        stage.wait_for(lambda: sum(map(gt, stage.merged(), before)), publishers, "publishers that go on")
        after, lasted_s = stage.merged(), time.monotonic() - begun
        pauses.add(after, begun + lasted_s)
        peak_mb, push_mb = stage.peak_mb(), stage.push_peak_mb()
    merged = [count - first for count, first in zip(after, before, strict=True)]
    name = f"{setup.nodes} nodes, {publishers} publishers of 1 KiB"
    yield Figure(f"{name}: merged", (sum(merged) * 1024 / 1e6 / lasted_s,), "MB/s")
    least = min(merged) / max(statistics.mean(merged), 1e-9)
    yield Figure(f"{name}: the slowest against the mean", (least,), "x")
    yield Figure(f"{name}: longest time without a merge for one of them", (pauses.longest_s,), "s")
    yield Figure(f"{name}: most memory of a node process", (peak_mb,), "MB")
    yield Figure(f"{name}: most memory of a push", (push_mb,), "MB")


@dataclass(slots=True)
class Pauses:
    """The longest time that any of several counters stood still, until now."""

    counts: list[int]
    since_s: list[float]
    """When each counter was first seen with its value."""
    longest_s: float = field(default=0.0, init=False)

    def add(self, counts: Sequence[int], now_s: float) -> None:
        for at, count in enumerate(counts):
            self.longest_s = max(self.longest_s, now_s - self.since_s[at])
            if count > self.counts[at]:
                self.counts[at], self.since_s[at] = count, now_s
