"""What streams raise, below `rt.RtError`.

    RtError
    └── StreamError
        ├── QueueElsewhere                 the stream's queue is not served by this host
        ├── DeliveryFailed                 a consumer did not take an event, however often it was asked
        ├── SubscriptionFaulted            it was given up after such a failure, until it is resumed
        ├── NoSuchSubscription (KeyError)  it ended, or never was
        ├── NotRewindable (ValueError)     the queue cannot go back to where it was asked to
        ├── NotWritable                    the queue can only be read
        └── ConsumerGone                   raised by a consumer: it wants nothing any more

A queue that is full raises `rt.Overloaded`, an owner that was succeeded `rt.Fenced`.
"""

from __future__ import annotations

from rt.errors import RtError


class StreamError(RtError):
    """Streams cannot do that."""

    grpc_status = "FAILED_PRECONDITION"


class QueueElsewhere(StreamError):
    """The queue that carries the stream is not served by this host now. Another one may, or none yet."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class DeliveryFailed(StreamError):
    """A consumer raised each time it was handed an event, as long as that was tried; the cause is chained."""


class SubscriptionFaulted(StreamError):
    """The subscription was given up, and gets nothing before it is resumed."""


class NoSuchSubscription(StreamError, KeyError):
    """There is no such subscription, or no longer; a handle that was resumed is void."""

    grpc_status = "NOT_FOUND"
    __str__ = RtError.__str__


class NotRewindable(StreamError, ValueError):
    """What has left the cache of such a queue is gone, so that no token leads back to it."""


class NotWritable(StreamError):
    """The queue can only be read."""


class ConsumerGone(StreamError):
    """For consumers to raise: end the subscription; this was the last that it was asked for."""
