"""Measures the cost of many subscriptions in the cluster: message latency while hosts save cursors.

    cd tests/support && python subscriptions_bench.py --subscriptions 100000 --hosts 10

Three nodes keep the subscriptions of one group. Each host serves one queue. Every second it commits the
cursors of a hundredth of its subscriptions. At the same time a publisher sends messages of 1 KiB to a
subscriber.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from statistics import median
from typing import Final

from rt.streams import Fence, QueueLeases, StreamId, cluster_stores
from rt.streams.balancer.cluster_leases import ClusterLeases
from rt.streams.balancer.lease import QUEUES, OwnedLease
from rt.streams.core.stream_id import QueueId, SequenceToken
from rt.streams.subscriptions.subscription_store import SubscriptionRecord, SubscriptionStore
from sequencer.bench.stage import Setup, Stage

GROUP: Final = "bench"
LEASE_S: Final = 60.0
AT_ONCE: Final = 500
"""Subscriptions made in one commit."""


class Host:
    """Serves one queue: makes its subscriptions and saves their cursors."""

    def __init__(self, stage: Stage, name: str) -> None:
        tls = stage.nodes.certificate("subscriber", "hosts", lease_groups=[GROUP])
        self.queue = QueueId(0, name)
        self.leases = ClusterLeases(stage.nodes.endpoints, tls, GROUP, owner=f"hosts~{name}")
        self.at = 0
        self.took_s: list[float] = []

    async def open(self) -> None:
        (answer,) = await self.leases.acquire([f"{QUEUES}{self.queue.name}"], LEASE_S)
        assert answer.lease is not None, answer
        self.lease: OwnedLease = answer.lease
        stores = cluster_stores(QueueLeases({self.queue.name: self.leases}))
        fence = Fence(self.lease.token)
        store = await asyncio.to_thread(stores, self.queue, fence)
        self.store = SubscriptionStore(store, self.queue, fence)

    async def subscribe(self, count: int) -> None:
        self.ids = [f"{number:032x}" for number in range(count)]
        for first in range(0, count, AT_ONCE):
            for each in self.ids[first : first + AT_ONCE]:
                record = SubscriptionRecord(each, StreamId("orders", each[-6:]), "consumer", created_s=1)
                self.store.put(record, SequenceToken(1))
            await self.store.commit()

    async def save(self) -> None:
        """Commit new cursors for a hundredth of the consumers."""
        self.at += 1
        moved = self.ids[self.at % 100 :: 100]
        begun_s = time.monotonic()
        self.store.record_positions(
            SequenceToken(1), dict.fromkeys(moved, SequenceToken(1_000_000 + self.at)), lambda _: False
        )
        await self.store.commit()
        self.took_s.append(time.monotonic() - begun_s)

    async def renew(self) -> None:
        (answer,) = await self.leases.renew([self.lease])
        assert answer.lease is not None, answer
        self.lease = answer.lease


class Hosts:
    """All hosts, in an event loop of their own."""

    def __init__(self, stage: Stage, count: int, subscriptions: int) -> None:
        self.hosts = [Host(stage, f"q{number}") for number in range(count)]
        self.is_made, self.is_saving, self.is_over = threading.Event(), threading.Event(), threading.Event()
        self._each = subscriptions // count
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()

    async def _run(self) -> None:
        for host in self.hosts:
            await host.open()
            await host.subscribe(self._each)
            await asyncio.gather(*(one.renew() for one in self.hosts if hasattr(one, "lease")))
        self.is_made.set()
        begun_s, count = time.monotonic(), len(self.hosts)
        await asyncio.gather(*(self._serve(host, begun_s + at / count) for at, host in enumerate(self.hosts)))

    async def _serve(self, host: Host, due_s: float) -> None:
        """Start at `due_s`: hosts on separate machines do not commit at the same moment."""
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        rounds = 0
        while not self.is_over.is_set():
            due_s, rounds = due_s + 1.0, rounds + 1
            if self.is_saving.is_set():
                await host.save()
            if rounds % 10 == 0:
                await host.renew()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def latencies_ms(stage: Stage, seconds: float) -> list[float]:
    (subscriber,) = stage.subscribers
    subscriber.ask("forget")
    time.sleep(seconds)
    return [each / 1e6 for each in subscriber.ask("latencies")["ns"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subscriptions", type=int, default=100_000)
    parser.add_argument("--hosts", type=int, default=10)
    parser.add_argument("--rate-hz", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    with Setup(None, 3).open() as stage:
        stage.start_publishers(1, 1024)
        stage.start_subscribers(1)
        begun_s = time.monotonic()
        hosts = Hosts(stage, options.hosts, options.subscriptions)
        while not hosts.is_made.wait(0.5):
            assert hosts.thread.is_alive(), "the hosts have failed"
        print(f"made in {time.monotonic() - begun_s:.1f} s")  # noqa: T201
        stage.ask("drip", rate_hz=options.rate_hz)
        time.sleep(3.0)
        for _ in range(options.rounds):
            for is_saving in (False, True):
                (hosts.is_saving.set if is_saving else hosts.is_saving.clear)()
                time.sleep(1.0)
                found[is_saving].append(latencies_ms(stage, options.seconds))
        peak_mb = stage.peak_mb()
        stage.stop()
        hosts.is_over.set()
        hosts.thread.join()
    for is_saving, rounds in found.items():
        p50, p99 = (median(each) for each in zip(*rounds, strict=True))
        print(f"cursors saved: {is_saving!s:5}  p50 {p50:6.1f} ms  p99 {p99:6.1f} ms")  # noqa: T201
    took_ms = sorted(1000 * each for host in hosts.hosts for each in host.took_s)
    print(f"a commit of cursors: median {median(took_ms):.1f} ms, most {took_ms[-1]:.1f} ms")  # noqa: T201
    print(f"most memory of a node process: {peak_mb:.0f} MB")  # noqa: T201


if __name__ == "__main__":
    main()
