"""Throughput and latency of the transport, and its fairness to many publishers.

Throughput is the amount that a majority of the nodes has merged in the measured time. It is sustained,
because publishers stay at most `LEAD_BYTES` ahead of the merged messages. Latency is from `publish` to the
subscriber.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field  # noqa: TID251
from operator import gt, sub
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from rt.bench.measure import Figure
from sequencer.bench.stage import ClusterProgress, Setup, Stage
from sequencer.bench.traffic import PERCENTS

LEAD_BYTES: Final = 64 << 20
MB_GOALS: Final = {1024: 100.0, 16 << 10: 130.0}
"""Value bytes merged a second, by the size of messages."""
MESSAGE_GOALS: Final = {128: 600_000.0}
LATENCY_GOALS_MS: Final = {10.0: {50: 4.0}, 1000.0: {50: 5.0, 99: 12.0}}
"""By messages a second and percentile."""
_WARM_UP_S: Final = 3.0
_POLL_S: Final = 0.1


def throughput(
    setup: Setup,
    *,
    publishers: int,
    subscribers: int,
    value_bytes: Sequence[int],
    seconds: float,
    rounds: int,
) -> Iterator[Figure]:
    """Merged and received bytes by message size, CPU time, memory; then latency at half of that rate."""
    for size in value_bytes:
        with setup.open() as stage:
            stage.start_publishers(publishers, size)
            stage.start_subscribers(subscribers)
            stage.ask("flood", lead_bytes=LEAD_BYTES // publishers)
            time.sleep(_WARM_UP_S)
            stage.wait_for(lambda: min(stage.progress().received), 1, "each subscriber receives")
            windows = [_window(stage, seconds) for _ in range(rounds)]
            peak_mb = stage.peak_mb()
            full_mb = statistics.median(one.merged_mb(size) / one.seconds for one in windows)
            published = sum(stage.stop().values())
            stage.wait_for(lambda: min(stage.progress().received), published, "all is received")
            half = {"rate_mb": full_mb / 2 / publishers, "lead_bytes": LEAD_BYTES // publishers}
            stage.ask("flood", **half)
            latencies_ms = [_latencies_ms(stage, seconds) for _ in range(rounds)]
        name = f"{setup.nodes} nodes, {publishers} publishers of {size} B"
        merged = tuple(one.merged_mb(size) / one.seconds for one in windows)
        yield Figure(f"{name}: merged on a majority", merged, "MB/s", MB_GOALS.get(size))
        messages = tuple(one.merged / one.seconds for one in windows)
        yield Figure(f"{name}: messages", messages, "messages/s", MESSAGE_GOALS.get(size))
        received = tuple(min(one.received) * size / 1e6 / one.seconds for one in windows)
        who = "a subscriber" if subscribers == 1 else f"the slowest of {subscribers} subscribers"
        yield Figure(f"{name}: received by {who}", received, "MB/s")
        for kind in windows[0].cpu_s:
            per_gb = tuple(one.cpu_s[kind] / one.merged_mb(size) * 1000 for one in windows)
            yield Figure(f"{name}: CPU of {kind}", per_gb, "s/GB")
        yield Figure(f"{name}: most memory of a node process", (peak_mb,), "MB")
        yield from _percentiles(f"{name}, at half of that rate", latencies_ms)


def latency(setup: Setup, *, rates_hz: Sequence[float], seconds: float, rounds: int) -> Iterator[Figure]:
    """Latency from `publish` to the subscriber, and the cost of a round of merging, at each rate."""
    with setup.open() as stage:
        stage.start_publishers(1, 1024)
        stage.start_subscribers(1)
        for rate_hz in rates_hz:
            stage.ask("drip", rate_hz=rate_hz)
            time.sleep(_WARM_UP_S)
            windows, latencies_ms = [], []
            for _ in range(rounds):
                before, begun = stage.progress(), time.monotonic()
                latencies_ms.append(_latencies_ms(stage, seconds))
                windows.append(_between(before, stage.progress(), time.monotonic() - begun))
            stage.stop()
            name = f"{setup.nodes} nodes, 1 KiB at {rate_hz:g} messages/s"
            yield from _percentiles(name, latencies_ms, LATENCY_GOALS_MS.get(rate_hz, {}))
            each_s = tuple(one.rounds / one.seconds for one in windows)
            yield Figure(f"{name}: rounds", each_s, "rounds/s")
            for kind in windows[0].cpu_s:
                per_round = tuple(one.cpu_s[kind] / one.rounds * 1000 for one in windows)
                yield Figure(f"{name}: CPU of {kind}", per_round, "ms/round")
            switches = tuple(one.switches / one.rounds for one in windows)
            yield Figure(f"{name}: context switches", switches, "switches/round")


class Window(Struct, frozen=True):
    """What was done in some seconds, as `ClusterProgress` counts."""

    seconds: float
    merged: int
    received: tuple[int, ...]
    rounds: int
    cpu_s: dict[str, float]
    switches: int

    def merged_mb(self, value_bytes: int) -> float:
        return self.merged * value_bytes / 1e6


def _window(stage: Stage, seconds: float) -> Window:
    """Measure for `seconds`, and longer if nothing is merged in that time."""
    before, begun = stage.progress(), time.monotonic()
    time.sleep(seconds)
    stage.wait_for(lambda: stage.progress().majority, before.majority + 1, "more is merged")
    return _between(before, stage.progress(), time.monotonic() - begun)


def _between(before: ClusterProgress, after: ClusterProgress, lasted_s: float) -> Window:
    return Window(
        lasted_s,
        after.majority - before.majority,
        tuple(map(sub, after.received, before.received)),
        max(after.rounds - before.rounds, 1),
        {kind: used_s - before.cpu_s[kind] for kind, used_s in after.cpu_s.items()},
        after.switches - before.switches,
    )


def _latencies_ms(stage: Stage, seconds: float) -> list[float]:
    """The percentiles `PERCENTS` of the latency."""
    (subscriber, *_) = stage.subscribers
    subscriber.ask("forget")
    time.sleep(seconds)
    latencies_ns: list[float] = []
    while not latencies_ns:  # On a busy machine the first message may take longer.
        stage.nodes.check_alive()
        time.sleep(_POLL_S)
        latencies_ns = subscriber.ask("latencies")["ns"]
    return [latency_ns / 1e6 for latency_ns in latencies_ns]


def _percentiles(
    name: str, rounds: Sequence[Sequence[float]], goals: Mapping[int, float] = MappingProxyType({})
) -> Iterator[Figure]:
    for percent, each in zip(PERCENTS, zip(*rounds, strict=True), strict=True):
        yield Figure(f"{name}: publish to subscriber, p{percent}", each, "ms", goals.get(percent))


def many(setup: Setup, *, publishers: int, seconds: float) -> Iterator[Figure]:
    """Measure whether publishers that all send at full speed get equal shares."""
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
