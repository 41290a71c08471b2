"""Streams: many logical streams over a few queues. Agents serve the queues; hosts share the agents.

    StreamProvider      what a host runs: publish, subscribe, resume
    MemoryQueues, GeneratorQueues, ClusterQueues   the queues; other kinds implement `QueueAdapterFactory`
    StreamObserver, EventObserver   what a consumer implements, for batches or for single events
    FixedBalancer, LeaseBalancer, RingBalancer, DeploymentBalancer   which host serves which queue

Invariants:
- Every subscription of a stream gets each published event at least once, in order.
- A consumer that stores its token gets each event exactly once.
- A slow consumer delays no other consumer. Only when the cache is full does the agent wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rt.streams.balancer.balancer import Fence, FixedBalancer, QueueBalancer, QueueListener
from rt.streams.core.errors import (
    ConsumerGone,
    DeliveryFailed,
    NoSuchSubscription,
    NotRewindable,
    NotWritable,
    OwnerTimeout,
    QueueElsewhere,
    StreamError,
    StreamMisplaced,
    SubscriptionFaulted,
)
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.dead_letters import StoredLetter, decode_letter
from rt.streams.delivery.options import StreamOptions
from rt.streams.observer import DeadLetter, EventObserver, StreamGap, StreamObserver
from rt.streams.provider import StreamProvider
from rt.streams.queue.generator import GeneratorQueues
from rt.streams.queue.mapper import HashRingQueueMapper, PartitionedQueueMapper, QueueMapper
from rt.streams.queue.memory import MemoryQueues
from rt.streams.stores import directory_stores, memory_stores
from rt.streams.stream import Stream, Subscription

if TYPE_CHECKING:
    from rt.streams.balancer.balancers import (
        DeploymentBalancer,
        LeaseBalancer,
        LeaseTimes,
        RingBalancer,
        best_fit,
    )
    from rt.streams.balancer.cluster_leases import ClusterLeases
    from rt.streams.balancer.queue_leases import QueueLeases
    from rt.streams.balancer.table_store import cluster_stores
    from rt.streams.cluster.cluster import Cluster
    from rt.streams.cluster.cluster_queues import ClusterQueues

__all__ = [
    "Cluster",
    "ClusterLeases",
    "ClusterQueues",
    "ConsumerGone",
    "DeadLetter",
    "DeliveryFailed",
    "DeploymentBalancer",
    "EventBatch",
    "EventObserver",
    "Fence",
    "FixedBalancer",
    "GeneratorQueues",
    "HashRingQueueMapper",
    "LeaseBalancer",
    "LeaseTimes",
    "MemoryQueues",
    "NoSuchSubscription",
    "NotRewindable",
    "NotWritable",
    "OwnerTimeout",
    "PartitionedQueueMapper",
    "QueueBalancer",
    "QueueElsewhere",
    "QueueId",
    "QueueLeases",
    "QueueListener",
    "QueueMapper",
    "RingBalancer",
    "SequenceToken",
    "StartPosition",
    "StoredLetter",
    "Stream",
    "StreamError",
    "StreamGap",
    "StreamId",
    "StreamMisplaced",
    "StreamObserver",
    "StreamOptions",
    "StreamProvider",
    "Subscription",
    "SubscriptionFaulted",
    "best_fit",
    "cluster_stores",
    "decode_letter",
    "directory_stores",
    "memory_stores",
]

_AT_FIRST_USE: Final = {
    "Cluster": "rt.streams.cluster.cluster",
    "ClusterQueues": "rt.streams.cluster.cluster_queues",
    "ClusterLeases": "rt.streams.balancer.cluster_leases",
    "DeploymentBalancer": "rt.streams.balancer.balancers",
    "LeaseBalancer": "rt.streams.balancer.balancers",
    "LeaseTimes": "rt.streams.balancer.balancers",
    "QueueLeases": "rt.streams.balancer.queue_leases",
    "RingBalancer": "rt.streams.balancer.balancers",
    "best_fit": "rt.streams.balancer.balancers",
    "cluster_stores": "rt.streams.balancer.table_store",
}


def __getattr__(name: str) -> Any:
    """Import the names that need a network at their first use."""
    if name in _AT_FIRST_USE:
        return getattr(import_module(_AT_FIRST_USE[name]), name)
    raise AttributeError(f"module 'rt.streams' has no attribute {name!r}")
