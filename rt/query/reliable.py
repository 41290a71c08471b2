"""The reliable contract: values with sequence ids, replay, acknowledgement.

Laws. Ids are whole numbers from 0 that rise. `subscribe` starts nothing: an observer hears nothing before
`start`, then every value from that id on, first what is kept, then what comes. An acknowledgement is
cumulative, may be repeated, and says that everything up to that id, inclusive, is durable at the consumer: it
will never ask for it again. Whoever produces keeps what is not acknowledged.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)

RESUME: Final = -1
"""To `start`: behind what this consumer acknowledged last."""
NOTHING: Final = -1
"""As a watermark: no value yet."""


class ReliableObserver(Protocol[T_contra]):
    """A consumer. Called by one thread at a time; after an error or the completion, never again."""

    def on_next(self, sequence_id: int, value: T_contra, /) -> None:
        """The next value. Returns when it is taken; if it raises, it was not, and comes again."""

    def on_error(self, error: Exception, /) -> None:
        """The source failed behind the values so far."""

    def on_completed(self) -> None:
        """There is nothing behind the values so far."""


class ReliableSubscription(Protocol):
    """One consumer's place in a source."""

    def start(self, sequence_id: int, /) -> None:
        """Send every value from that id on, inclusive; `RESUME`: from where this consumer stands.

        `NotInBuffer` for ids that are acknowledged, or lie beyond the end.
        """

    def acknowledge(self, sequence_id: int, /) -> None:
        """Everything up to that id, inclusive, will not be asked for again; `NOTHING` says nothing.

        `NotInBuffer` beyond the end. An id below an earlier one changes nothing.
        """

    def dispose(self) -> None:
        """End it: the source keeps nothing for this consumer any more. Twice is as once."""


class ReliableObservable(Protocol[T_co]):
    """A source that can be asked again."""

    @property
    def is_dense(self) -> bool:
        """Whether it promises that ids have no gaps."""

    def subscribe(self, observer: ReliableObserver[T_co], /) -> ReliableSubscription:
        """A subscription that is not started."""
