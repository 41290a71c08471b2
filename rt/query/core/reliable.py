"""The reliable protocol: values with sequence ids, replay, acknowledgement.

Invariants:
- Ids are integers from 0 that only grow.
- `subscribe` starts nothing. After `start` the observer receives every value from that id on: first the kept
  values, then new ones.
- An acknowledgement is cumulative and may be repeated. Everything up to its id, inclusive, is durable at the
  consumer, which never requests it again.
- A source keeps unacknowledged values.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar, runtime_checkable

T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)

RESUME: Final = -1
"""Argument of `start`: continue after the consumer's last acknowledgement."""
NOTHING: Final = -1
"""As a watermark: no value yet."""


class ReliableObserver(Protocol[T_contra]):
    """A consumer. Called by one thread at a time. Must not be called after an error or the completion.

    The caller must not hold a lock that `acknowledge` or another method of its subscription needs.
    """

    def on_next(self, sequence_id: int, value: T_contra, /) -> None:
        """Accept the next value. If this raises, the value was not accepted and must be sent again."""

    def on_error(self, error: Exception, /) -> None:
        """The source failed after the values so far."""

    def on_completed(self) -> None:
        """The source completed after the values so far."""


class ReliableSubscription(Protocol):
    """A consumer's subscription to a source.

    Any thread may call it, also while another thread sends. When the consumer calls it, the consumer must not
    hold a lock that its `on_next` needs. If a method raises, it may be called again.
    """

    def start(self, sequence_id: int, /) -> None:
        """Send every value from this id on, inclusive; `RESUME`: after the last acknowledgement.

        Raises `NotInBuffer` for ids that are acknowledged, or are beyond the end.
        """

    def acknowledge(self, sequence_id: int, /) -> None:
        """Values up to this id, inclusive, will not be requested again. `NOTHING` has no effect.

        An id below an earlier one has no effect. Raises `NotInBuffer` beyond the end.
        """

    def dispose(self) -> None:
        """End the subscription: the source keeps no values for it. Must be idempotent."""


@runtime_checkable
class EpochSource(Protocol):
    """A source whose ids may get other values, for example by a forced reset of a cluster."""

    epoch: int | None
    """Identifies the values so far; None if nothing was sent. Any thread may read it. Must not raise.

    The engine stores the epoch with the watermark, and sets the stored epoch before `start`. If a value up to
    the watermark was replaced since then, the source must raise instead of sending a value.
    """


class ReliableObservable(Protocol[T_co]):
    """A source that can send values again.

    It may have a property `end`: the id of its next value, or None if it does not know. Must not raise. Any
    thread may read it. If its ids may get other values, it must be an `EpochSource` too.
    """

    @property
    def is_dense(self) -> bool:
        """Whether the ids have no gaps."""

    def subscribe(self, observer: ReliableObserver[T_co], /) -> ReliableSubscription:
        """Returns a subscription that is not started."""
