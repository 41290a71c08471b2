"""Streams: many logical streams over a few queues, served by agents that hosts share among them.

    StreamProvider      what a host runs: publish, subscribe, resume
    MemoryQueues, GeneratorQueues, ClusterQueues   the queues: others need `QueueAdapterFactory`
    StreamObserver      what a consumer implements
    FixedBalancer, LeaseBalancer, RingBalancer, DeploymentBalancer   which host serves which queue

Law: an event that was published is handed to every subscription of its stream at least once, in order, and
once to a consumer that keeps its token; slow consumers make nobody wait but, at the limit, the agent.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rt.streams.balancing import Fence, FixedBalancer, QueueBalancer, QueueListener
from rt.streams.batches import EventBatch
from rt.streams.errors import (
    ConsumerGone,
    DeliveryFailed,
    NoSuchSubscription,
    NotRewindable,
    NotWritable,
    QueueElsewhere,
    StreamError,
    SubscriptionFaulted,
)
from rt.streams.generator_queues import GeneratorQueues
from rt.streams.ids import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.mapping import HashRingQueueMapper, PartitionedQueueMapper, QueueMapper
from rt.streams.memory_queues import MemoryQueues
from rt.streams.observing import DeadLetter, StreamGap, StreamObserver
from rt.streams.options import StreamOptions
from rt.streams.provider import Stream, StreamProvider, Subscription, directory_stores, memory_stores

if TYPE_CHECKING:
    from rt.streams.balancers import DeploymentBalancer, LeaseBalancer, RingBalancer, best_fit
    from rt.streams.cluster_leases import ClusterLeases
    from rt.streams.cluster_queues import Cluster, ClusterQueues

__all__ = [
    "Cluster",
    "ClusterLeases",
    "ClusterQueues",
    "ConsumerGone",
    "DeadLetter",
    "DeliveryFailed",
    "DeploymentBalancer",
    "EventBatch",
    "Fence",
    "FixedBalancer",
    "GeneratorQueues",
    "HashRingQueueMapper",
    "LeaseBalancer",
    "MemoryQueues",
    "NoSuchSubscription",
    "NotRewindable",
    "NotWritable",
    "PartitionedQueueMapper",
    "QueueBalancer",
    "QueueElsewhere",
    "QueueId",
    "QueueListener",
    "QueueMapper",
    "RingBalancer",
    "SequenceToken",
    "StartPosition",
    "Stream",
    "StreamError",
    "StreamGap",
    "StreamId",
    "StreamObserver",
    "StreamOptions",
    "StreamProvider",
    "Subscription",
    "SubscriptionFaulted",
    "best_fit",
    "directory_stores",
    "memory_stores",
]

_AT_FIRST_USE: Final = {
    "Cluster": "rt.streams.cluster_queues",
    "ClusterQueues": "rt.streams.cluster_queues",
    "ClusterLeases": "rt.streams.cluster_leases",
    "DeploymentBalancer": "rt.streams.balancers",
    "LeaseBalancer": "rt.streams.balancers",
    "RingBalancer": "rt.streams.balancers",
    "best_fit": "rt.streams.balancers",
}


def __getattr__(name: str) -> Any:
    """What needs a network, at its first use."""
    if name in _AT_FIRST_USE:
        return getattr(import_module(_AT_FIRST_USE[name]), name)
    raise AttributeError(f"module 'rt.streams' has no attribute {name!r}")
