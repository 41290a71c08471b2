"""A host of streams, as a program: `stream_host.py CONFIG`, until SIGTERM.

Every stream of both clusters has two implicit subscriptions. `keeping` appends to a file of the stream that
all hosts share, and returns the token of the file's last line. `plain` appends to a file of the stream and
this process. The consumer `asked` does the same for explicit subscriptions. The subscriptions and the leases
of a queue are in the queue's cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import rt
from rt.streams import (
    Cluster,
    ClusterQueues,
    EventBatch,
    LeaseBalancer,
    QueueLeases,
    SequenceToken,
    StreamId,
    StreamObserver,
    StreamOptions,
    StreamProvider,
    cluster_stores,
)
from rt.streams.balancer.balancers import LeaseTimes
from rt.streams.metrics_server import serve_metrics


class Appending(StreamObserver):
    """Appends a line for each event: position and value. `last_token` removes a line that a kill left
    incomplete.
    """

    def __init__(self, path: Path, *, keeps_token: bool) -> None:
        self._path = path
        self._keeps_token = keeps_token

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        lines = "".join(f"{token} {event.decode()}\n" for token, event in batch)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            assert os.write(file, lines.encode()) == len(lines)
        finally:
            os.close(file)
        return None

    async def last_token(self) -> SequenceToken | None:
        if not self._keeps_token or not self._path.exists():
            return None
        text = self._path.read_bytes()
        os.truncate(self._path, end := text.rfind(b"\n") + 1)
        return SequenceToken(int(text[:end].splitlines()[-1].split()[0])) if end else None


async def main(config: dict[str, Any]) -> None:
    out, host = Path(config["out"]), config["host"]
    clusters = {}
    for name, cluster in config["clusters"].items():
        tls = rt.TLS(*cluster["tls"])
        clusters[name] = Cluster(name, f"{config['copies']}/{host}", cluster["endpoints"], tls, name="hosts")
    leases = QueueLeases.of_clusters(clusters, "streams")
    balancer = LeaseBalancer(leases, times=LeaseTimes(lease_s=10.0, look_s=0.3))
    provider = StreamProvider(
        "load",
        ClusterQueues(clusters),
        balancer=balancer,
        stores=cluster_stores(leases),
        options=StreamOptions(save_every_s=0.2, drain_s=5, cache_events=2000, batch_events_max=50),
        host=host,
    )

    def keeping(stream: StreamId) -> StreamObserver:
        return Appending(out / f"keeping.{stream.key}", keeps_token=True)

    def plain(stream: StreamId) -> StreamObserver:
        return Appending(out / f"plain.{stream.key}.{host}", keeps_token=False)

    def asked(stream: StreamId) -> StreamObserver:
        return Appending(out / f"asked.{stream.key}.{host}", keeps_token=False)

    provider.consumer("asked", asked)
    provider.implicit("keeping", "load/*", keeping)
    provider.implicit("plain", "load/*", plain)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with provider, serve_metrics([provider], port=config["port"]):
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
