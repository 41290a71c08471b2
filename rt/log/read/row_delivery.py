"""One batch that is delivered message by message, and the rest of it that is not delivered yet.

Invariants:
- Each message is delivered once: by the iterator of `start`, or with the rest that `take_rest` returns.
- No counter changes when a message is delivered: the length of the iterator over the positions is the number
  of messages that are left.
- `start` and `keep` are for the thread that reads. The other methods may be called from any thread.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from typing import TypeAlias

from rt.log.scan.message_batch import Message, MessageBatch

_State: TypeAlias = tuple[MessageBatch | None, Iterator[int]]


class RowDelivery:
    """Empty until `start`."""

    def __init__(self) -> None:
        self._state: _State = None, iter(())
        """The batch, and an iterator with one entry for each of its last messages that was not delivered
        yet.
        """
        self._lock = threading.RLock()
        """Held while the positions move to another iterator. Reentrant: a signal handler may close the
        reader.
        """

    def start(self, batch: MessageBatch) -> Iterator[Message]:
        """The messages of `batch`, until `hold` or `take_rest` ends them."""
        rows = iter(batch.positions.tolist())
        with self._lock:
            self._state = batch, rows
        return batch.messages(rows)

    def keep(self, batch: MessageBatch) -> None:
        """Keep `batch` for `take_rest`. No message of it is delivered before."""
        with self._lock:
            self._state = batch, iter(range(len(batch)))

    def hold(self) -> None:
        """End the iterator of `start`. The messages that were not delivered stay for `take_rest`."""
        with self._lock:
            batch, rows = self._state
            self._state = batch, iter(range(len(list(rows))))

    def disown(self) -> None:
        """Do `hold` in a forked child, even if the lock is held by a thread that does not exist in the
        child.
        """
        self._lock = threading.RLock()
        self.hold()

    def take_rest(self) -> MessageBatch | None:
        """The messages that were not delivered. The iterator of `start` will not return them any more."""
        with self._lock:
            batch, rows = self._state
            left = len(list(rows))
            self._state = None, iter(())
        return batch.slice(len(batch) - left, len(batch)) if batch is not None and left else None

    @property
    def rest(self) -> tuple[MessageBatch, int] | None:
        """The batch, and the number of its last messages that were not delivered; None if all were
        delivered.
        """
        with self._lock:
            batch, rows = self._state
            left = operator.length_hint(rows)
        return (batch, left) if batch is not None and left else None

    @property
    def position(self) -> int | None:
        """The position of the next message; None if there is none."""
        if (rest := self.rest) is None:
            return None
        batch, left = rest
        return int(batch.positions[len(batch) - left])
