"""Queues that are rt streams: each cluster is a queue, each topic of its log a logical stream.

An event is a message's value with the token (position, 0). With `split` a message carries several events:
the i-th has the token (position, i). Everything that the nodes retain can be read again; without nodes, what
the log directory retains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from rt.log.format.headers import Headers
from rt.net.lease_client import LeaseCalls
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_events import Split, TopicSelection, position_of
from rt.streams.cluster.cluster_history import ClusterHistory
from rt.streams.cluster.cluster_receiver import ClusterReceiver
from rt.streams.cluster.cluster_writer import ClusterWriter
from rt.streams.cluster.leading_receiver import LeadingReceiver
from rt.streams.cluster.local_copy import end_of, position_at
from rt.streams.cluster.log_gaps import LogGaps
from rt.streams.cluster.node_ranges import NodeLogs
from rt.streams.core.errors import NotWritable
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId
from rt.streams.queue.adapter import StreamDirection
from rt.streams.queue.mapper import PartitionedQueueMapper, QueueMapper
from rt.streams.queue.queue_epoch import QueueEpoch

EPOCH_S: Final = 5.0
"""How long the nodes may take to report their epoch, in seconds."""


class ClusterQueues:
    """One queue per entry of `clusters`, named by its key. Factory and adapter in one.

    `placement` says where other programs publish: a pattern of topics (`*`, `?`, `[…]`), and the key of the
    cluster. The first pattern that matches counts. All other streams are placed by their hash.

    `topics` are patterns of the topics that this host reads. All hosts must have the same ones. The nodes
    send no others, and the copy of each list has a directory of its own. In a directory without nodes others
    are passed over before their values are read. They cannot be subscribed to. None: all topics.
    """

    is_rewindable: Final = True

    def __init__(
        self,
        clusters: Mapping[str, Cluster],
        *,
        split: Split | None = None,
        placement: Mapping[str, str] | None = None,
        topics: Collection[str] | None = None,
    ) -> None:
        self.mapper: QueueMapper = PartitionedQueueMapper(tuple(clusters), placement or {})
        self._clusters = dict(clusters)
        self._split = split
        self._topics = TopicSelection(topics)
        self._writers: dict[str, ClusterWriter] = {}
        self._nodes: dict[str, NodeLogs] = {}
        self._epochs: dict[str, QueueEpoch] = {}
        """By queue: the last epoch that its cluster reported."""

    @property
    def direction(self) -> StreamDirection:
        """Writable only if every cluster has a publisher."""
        can_write = all(cluster.writer is not None for cluster in self._clusters.values())
        return StreamDirection.READ_WRITE if can_write else StreamDirection.READ_ONLY

    async def adapter(self) -> ClusterQueues:
        return self

    async def publish(
        self, queue: QueueId, stream: StreamId, events: Sequence[Any], headers: Headers = ()
    ) -> None:
        """Publish values, in order. Returns when they have reached the cluster's `level`.

        Raises the errors of `rt.Publisher`. After `rt.Timeout` the values may still be merged.
        """
        cluster = self._clusters[queue.name]
        if cluster.writer is None:
            hint = "Give its Cluster a writer."
            raise NotWritable(
                "this host has no publisher for the cluster", where=queue, got=stream, hint=hint
            )
        writer = self._writers.get(queue.name)
        if writer is None:
            writer = ClusterWriter(cluster.writer, cluster.level, cluster.level_s)
            self._writers[queue.name] = writer
        await writer.publish(stream.topic, events, headers)

    async def receiver(
        self,
        queue: QueueId,
        start: SequenceToken | None,
        store_id: str | None = None,
        needed: SequenceToken | None = None,
    ) -> ClusterReceiver | LeadingReceiver:
        """With nodes and a `start`, the queue is read from the nodes until the copy of this host follows
        them. The copy has the messages from `needed` on.
        """
        cluster, nodes = self._clusters[queue.name], self._nodes_of(queue)
        epoch = self._epochs.get(queue.name)
        receiver = ClusterReceiver(
            cluster, nodes, needed or start, self._split, store_id, epoch, self._topics
        )
        await receiver.check_copy()
        if nodes is None or start is None:
            await receiver.open()
            return receiver
        gaps = LogGaps(cluster.stream)
        generation = self._generation_of(queue)
        lead = nodes.feed(position_of(start, self._split), self._topics.interest, gaps, generation)
        return LeadingReceiver(receiver, lead, gaps, start, self._split, self._topics)

    def reads(self, stream: StreamId) -> bool:
        return self._topics.has(stream.topic)

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> ClusterHistory:
        nodes, generation = self._nodes_of(queue), self._generation_of(queue)
        return ClusterHistory(self._directory(queue), nodes, stream, start, self._split, generation)

    async def latest(self, queue: QueueId) -> SequenceToken | None:
        """The end of the log on the nodes, or in the directory."""
        nodes = self._nodes_of(queue)
        if nodes is not None:
            return SequenceToken(await nodes.end())
        end = await asyncio.to_thread(end_of, self._directory(queue))
        return None if end is None else SequenceToken(end)

    async def token_at(self, queue: QueueId, timestamp_ns: int) -> SequenceToken:
        """The first message of any topic with this timestamp or a later one: on the nodes, or in the
        directory.
        """
        nodes = self._nodes_of(queue)
        if nodes is not None:
            return SequenceToken(await nodes.position_at(timestamp_ns))
        return SequenceToken(await asyncio.to_thread(position_at, self._directory(queue), timestamp_ns))

    async def epoch(self, queue: QueueId) -> QueueEpoch | None:
        """The epoch of the queue, as a majority of the nodes knows it. None if there are no nodes, or if they
        do not report it.
        """
        cluster = self._clusters[queue.name]
        if not cluster.endpoints or cluster.tls is None:
            return None
        calls = LeaseCalls(cluster.endpoints, cluster.tls)
        try:
            known = await calls.acknowledge({}, timeout_s=EPOCH_S)
        finally:
            await calls.close()
        if known.epoch is None:
            return None
        epoch = self._epochs[queue.name] = QueueEpoch(known.epoch, known.log_end)
        return epoch

    async def close(self) -> None:
        """Close the publishers. Replication of published messages continues in the background."""
        nodes, self._nodes = self._nodes, {}
        for logs in nodes.values():
            await asyncio.to_thread(logs.close)
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            await writer.close()

    def _generation_of(self, queue: QueueId) -> int | None:
        """The generation of forced resets in which the positions are valid; None if it is not known."""
        epoch = self._epochs.get(queue.name)
        return None if epoch is None else epoch.stored.generation

    def _directory(self, queue: QueueId) -> str:
        return self._clusters[queue.name].directory(self._topics.patterns)

    def _nodes_of(self, queue: QueueId) -> NodeLogs | None:
        """The log of the queue's nodes; None if it is only a directory."""
        cluster = self._clusters[queue.name]
        if not cluster.endpoints or cluster.tls is None:
            return None
        if queue.name not in self._nodes:
            self._nodes[queue.name] = NodeLogs(cluster.endpoints, cluster.stream, cluster.tls)
        return self._nodes[queue.name]
