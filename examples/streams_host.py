"""A host of streams: prints the events of every stream that matches a pattern.

Files only:      python examples/streams_host.py --path data/trades/sessions/feed1 --seconds 3
With a cluster:  several hosts share the queue, and the cluster keeps their subscriptions; the certificate
                 needs `--lease hosts`:
                 … --endpoints node1:5002,… --ca ca.crt --cert hosts.crt --key hosts.key
Topics are namespace/key: `publisher_service.py --topic trades/AAPL`.
"""

import argparse
import asyncio
import os

import rt
from rt.streams import (
    Cluster,
    ClusterQueues,
    EventBatch,
    LeaseBalancer,
    QueueLeases,
    StreamId,
    StreamObserver,
    StreamProvider,
    cluster_stores,
    directory_stores,
)

parser = argparse.ArgumentParser(description="Print the events of streams.")
parser.add_argument(
    "--path", default="data/trades/sessions/feed1", help="A log; with --endpoints, where to copy it."
)
parser.add_argument("--stream", default="trades")
parser.add_argument("--pattern", default="trades/*")
parser.add_argument(
    "--subscriptions", default="data/subscriptions", help="Without a cluster: directory of the store."
)
parser.add_argument("--start", choices=["earliest", "latest"], help="Where it starts, the first time.")
parser.add_argument("--seconds", type=float, help="Stop after this time.")
parser.add_argument("--endpoints", help="host:port of each node, separated by commas.")
parser.add_argument("--ca")
parser.add_argument("--cert")
parser.add_argument("--key")
options = parser.parse_args()


class Printer(StreamObserver):
    """A consumer: one for each stream."""

    def __init__(self, stream: StreamId) -> None:
        self.stream = stream

    async def on_batch(self, batch: EventBatch) -> None:
        """Events that this raises for come again."""
        for token, event in batch:
            print(self.stream, token, event, flush=True)


async def main() -> None:
    """Serve the queue until the time is over."""
    if options.endpoints:
        tls = rt.TLS(ca=options.ca, cert=options.cert, key=options.key)
        clusters = {"all": Cluster(options.stream, options.path, options.endpoints.split(","), tls)}
        leases = QueueLeases.of_clusters(clusters, "hosts")
        balancer, stores = LeaseBalancer(leases), cluster_stores(leases)
    else:
        clusters = {"all": Cluster(options.stream, options.path)}
        os.makedirs(options.subscriptions, exist_ok=True)
        balancer, stores = None, directory_stores(options.subscriptions)
    provider = StreamProvider("printer", ClusterQueues(clusters), balancer=balancer, stores=stores)
    provider.implicit("printer", options.pattern, Printer, start=options.start)
    async with provider:
        await asyncio.sleep(options.seconds if options.seconds is not None else 1e9)


asyncio.run(main())
