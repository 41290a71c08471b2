"""A subscription with a name: any host makes it, and the host that serves its queue prints the events.

Files only:      python examples/streams_subscription.py --stream trades/AAPL --seconds 3
                 The next start continues where the last one ended.
With a cluster:  start it on two machines, and end the one that prints: the other continues. The certificate
                 needs `--lease prices`:
                 … --path copy --endpoints node1:5002,… --ca ca.crt --cert hosts.crt --key hosts.key

Only the topics of the subscription cross the network: the nodes filter. Events come again after a crash, as
far back as `save_every_s`; a consumer that stores tokens with its own work answers `last_token` instead.
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
    LeaseTimes,
    QueueLeases,
    StreamGap,
    StreamId,
    StreamObserver,
    StreamProvider,
    cluster_stores,
    directory_stores,
)

parser = argparse.ArgumentParser(description="Print the events of one stream, each once.")
parser.add_argument("--stream", default="trades/AAPL", help="The topic: namespace/key.")
parser.add_argument("--name", default="prices", help="The name of the subscription.")
parser.add_argument("--log", default="trades", help="The name of the log that has the topic.")
parser.add_argument(
    "--path", default="data/trades/sessions/feed1", help="A log; with --endpoints, where to copy it."
)
parser.add_argument("--host", help="A name for this host. Default: the machine's.")
parser.add_argument("--seconds", type=float, help="Stop after this time.")
parser.add_argument("--endpoints", help="host:port of each node, separated by commas.")
parser.add_argument("--ca")
parser.add_argument("--cert")
parser.add_argument("--key")
options = parser.parse_args()


class Printer(StreamObserver):
    """The consumer, on whichever host serves the queue."""

    def __init__(self, stream: StreamId) -> None:
        self.stream = stream

    async def on_batch(self, batch: EventBatch) -> None:
        """Events that this raises for come again."""
        for token, event in batch:
            print(self.stream, token, event, flush=True)

    async def on_gap(self, gap: StreamGap) -> None:
        """Events that the nodes had trimmed before they were read."""
        print("missing:", gap, flush=True)


def open_provider(stream: StreamId) -> StreamProvider:
    """A host of the queue that has the stream."""
    if options.endpoints:
        tls = rt.TLS(ca=options.ca, cert=options.cert, key=options.key)
        name = tls.identity.name  # With it the nodes hold the log for the subscription.
        clusters = {"all": Cluster(options.log, options.path, options.endpoints.split(","), tls, name=name)}
        leases = QueueLeases.of_clusters(clusters, "prices")
        # Another host goes on about 9 s after this one was lost.
        times = LeaseTimes(lease_s=8.0, look_s=0.5)
        balancer, stores = LeaseBalancer(leases, times=times), cluster_stores(leases)
    else:
        clusters = {"all": Cluster(options.log, options.path)}
        os.makedirs("data/subscriptions", exist_ok=True)
        balancer, stores = None, directory_stores("data/subscriptions")
    queues = ClusterQueues(clusters, topics=[stream.topic])
    return StreamProvider("prices", queues, balancer=balancer, stores=stores, host=options.host)


async def main() -> None:
    """Have the subscription, and serve it if its queue comes here, until the time is over."""
    stream = StreamId(*options.stream.split("/", 1))
    provider = open_provider(stream)
    provider.consumer("printer", Printer)  # All hosts have it, so that the subscription can move to any.
    async with provider:
        handle = provider.stream(stream.namespace, stream.key)
        await handle.subscribe(Printer(stream), start="earliest", consumer="printer", name=options.name)
        await asyncio.sleep(options.seconds if options.seconds is not None else 1e9)


asyncio.run(main())
