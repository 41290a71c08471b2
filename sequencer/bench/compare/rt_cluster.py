"""rt itself: three nodes, one publisher, one subscriber, as `rt bench transport` runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import rt
from sequencer.bench.compare.programs import Programs
from sequencer.bench.compare.system import NODES, STREAM, ClientSettings, Facts, Options, RunningServers
from sequencer.bench.speed import LEAD_BYTES
from sequencer.localcluster.clients import client_settings, open_publisher, open_subscriber
from sequencer.localcluster.nodes import LocalCluster

_POLL_S: Final = 0.01


class RtSystem:
    def check(self) -> None:
        """The system rt needs no other program or library."""

    def start(self, options: Options, programs: Programs) -> RunningServers:
        nodes = programs.hold(LocalCluster(options.root, NODES, stream=STREAM))
        nodes.start()
        nodes.wait_ready()
        return RunningServers(
            Facts(
                version=f"rt {rt.__version__}",
                client="rt.Publisher, rt.Subscriber",
                replication="Raft; acknowledged when a majority has it and its merge is committed",
                fsync="before each acknowledgement, on publisher and majority",
                tls="mutual, on all links",
                consumer="local copy of the merged log, fed by any node",
            ),
            tuple(nodes.pids(name)[0] for name in nodes.names),
            client_settings(nodes, "publisher", "publisher", options.root / "published"),
            client_settings(nodes, "subscriber", "reader", options.root / "reader"),
        )

    async def open_publisher(self, settings: ClientSettings) -> RtPublisher:
        return RtPublisher(open_publisher(dict(settings)))

    async def open_consumer(self, settings: ClientSettings) -> RtConsumer:
        return RtConsumer(open_subscriber(dict(settings)))


class RtPublisher:
    """Stays at most `LEAD_BYTES` ahead of the merged messages."""

    def __init__(self, publisher: rt.Publisher) -> None:
        self._publisher = publisher

    @property
    def acknowledged(self) -> int:
        return self._publisher.progress.merged

    async def publish(self, values: Sequence[bytes]) -> None:
        lead = max(len(values), LEAD_BYTES // len(values[0]))
        while self._publisher.next_number - self.acknowledged > lead:
            await asyncio.sleep(_POLL_S)
        if len(values) == 1:
            self._publisher.publish(values[0])
        else:
            self._publisher.publish_many(values)

    async def flush(self) -> None:
        self._publisher.flush()
        while self.acknowledged < self._publisher.next_number:
            await asyncio.sleep(_POLL_S)


class RtConsumer:
    def __init__(self, subscriber: rt.Subscriber) -> None:
        self._batches = subscriber.batches()

    async def receive(self) -> Sequence[bytes]:
        return next(self._batches).values


SYSTEM: Final = RtSystem()
