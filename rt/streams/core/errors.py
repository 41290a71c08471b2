"""The errors of streams, below `rt.RtError`.

    RtError
    └── StreamError
        ├── QueueElsewhere                 this host does not serve the stream's queue
        ├── OwnerTimeout (rt.Timeout)      the host that serves it did not answer a request in time
        ├── StreamMisplaced                its events are in another queue than the mapper says
        ├── QueueReset                     a reset was forced: the agent starts again where the log did
        ├── DeliveryFailed                 a consumer rejected an event on every try
        ├── SubscriptionFaulted            stopped after such a failure, until it is resumed
        ├── NoSuchSubscription (KeyError)  it ended or never existed
        ├── NotRewindable (ValueError)     the queue cannot go back to the requested token
        ├── NotWritable                    the queue is read-only
        └── ConsumerGone                   raised by a consumer to end its subscription

A full queue raises `rt.Overloaded`. An owner that was replaced gets `rt.Fenced`.
"""

from __future__ import annotations

from rt.errors import Closed, RtError, Timeout


class StreamError(RtError):
    grpc_status = "FAILED_PRECONDITION"


class QueueElsewhere(StreamError):
    """This host does not serve the queue that carries the stream. Another host may, or none yet."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class OwnerTimeout(StreamError, Timeout):
    """The owner of the queue, which the error names, did not answer a request in time. It carries it out no
    more, unless it was doing so.
    """

    grpc_status = "DEADLINE_EXCEEDED"
    retriable = True


class StreamMisplaced(StreamError):
    """Other programs publish the stream to another queue than the mapper says: a subscription would get
    nothing.
    """


class QueueReset(StreamError):
    """An operator forced the cluster to an earlier state while its queue was served. The agent restarts."""


class DeliveryFailed(StreamError):
    """A consumer raised on every try to deliver an event. The cause is chained."""


class SubscriptionFaulted(StreamError):
    """The subscription was stopped and gets no events until it is resumed."""


class NoSuchSubscription(StreamError, KeyError):
    """The subscription ended or never existed. A handle that was resumed is void."""

    grpc_status = "NOT_FOUND"
    __str__ = RtError.__str__


class NotRewindable(StreamError, ValueError):
    """The events are no longer in the cache of a queue that cannot be read again."""


class NotWritable(StreamError):
    pass


class ConsumerGone(StreamError):
    """Raise it in a consumer to end its subscription. The consumer is not called again for an event."""


def wrong_state(provider: str, call: str = "", *, is_closed: bool) -> Closed:
    """The error of a provider in the wrong state: it is closed, it was started before `call`, or it was not
    started (no `call`).
    """
    prefix = f"cannot call {call}: " if call else ""
    if is_closed:
        return Closed(f"{prefix}the provider is closed", where=provider)
    if not call:
        hint = "Use it in `async with`, or await `start()` first."
        return Closed("the provider is not started", where=provider, hint=hint)
    hint = "Call it once." if call == "start" else "Register consumers before `start()`."
    return Closed(f"{prefix}the provider was already started", where=provider, hint=hint)
