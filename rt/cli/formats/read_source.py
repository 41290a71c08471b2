"""Where `rt sub` reads from: a log, a named subscriber of it, or a copy that is pulled from nodes.

Invariant: only messages that were written are acknowledged, even if the reader has read more.
"""

from __future__ import annotations

import time
from typing import Protocol

from rt.cli.formats.console import EventPrinter
from rt.cli.formats.writers import MessageRows, Polled
from rt.client.subscriber import Subscriber
from rt.log.disk import REAL
from rt.log.read.reader import LogReader, Place
from rt.log.scan.directory import is_log_directory, read_durable_end

_POLL_MESSAGES = 4096
_ACKNOWLEDGE_SECONDS = 1.0
"""Interval of acknowledgements while messages arrive: each one costs two syncs."""
_LOOK_SECONDS = 0.1
"""Interval of checks whether the copy has reached the end of the log."""


class ReadSource(Protocol):
    def next(self, most: int) -> MessageRows | None:
        """Up to `most` messages; None at the end of the log."""

    def written(self) -> None:
        """Record that the messages of the last `next` were written."""

    def acknowledge(self) -> None: ...

    def close(self) -> None: ...


class AnonymousReader:
    """Reads a log without a name: nothing is acknowledged."""

    def __init__(
        self,
        path: str,
        position: Place | None,
        topics: tuple[str, ...],
        printer: EventPrinter,
        *,
        is_following: bool,
    ) -> None:
        self._reader = LogReader(
            path,
            position="earliest" if position is None else position,
            follow=is_following,
            topics=topics or None,
            on_event=printer,
        )

    def next(self, most: int) -> MessageRows | None:
        return self._reader.next_batch(None, most)

    def written(self) -> None: ...

    def acknowledge(self) -> None: ...

    def close(self) -> None:
        self._reader.close()


class NamedSubscriber:
    """Reads a log as a named subscriber. It acknowledges when it is idle, or once a second."""

    def __init__(self, subscriber: Subscriber, *, is_following: bool) -> None:
        self._subscriber = subscriber
        self._is_following = is_following
        self._done = self._acknowledged = self._subscriber.position
        self._next_time = time.monotonic() + _ACKNOWLEDGE_SECONDS

    def next(self, most: int) -> MessageRows | None:
        messages = self._subscriber.poll(min(most, _POLL_MESSAGES), 0.0)
        if not messages:
            self.acknowledge()
            if not self._is_following:
                return None
            messages = self._subscriber.poll(min(most, _POLL_MESSAGES), None)
        return Polled(messages)

    def written(self) -> None:
        self._done = self._subscriber.position
        if time.monotonic() >= self._next_time:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge the position, durably, if it moved."""
        if self._done != self._acknowledged and self._subscriber.name is not None:
            self._subscriber.ack(self._done)
            self._acknowledged = self._done
        self._next_time = time.monotonic() + _ACKNOWLEDGE_SECONDS

    def close(self) -> None:
        self._subscriber.close()


class PulledLog(NamedSubscriber):
    """Reads a copy that is pulled from nodes. The end is the end of the log when a node was first reached."""

    def __init__(self, subscriber: Subscriber, *, is_following: bool) -> None:
        super().__init__(subscriber, is_following=is_following)
        self._end: int | None = None

    def next(self, most: int) -> MessageRows | None:
        """Without --follow it waits until the copy has reached the end."""
        if self._is_following:
            return super().next(most)
        while True:
            is_all_here = self._is_all_here()  # Before the poll, because messages may arrive in between.
            messages = self._subscriber.poll(min(most, _POLL_MESSAGES), 0.0 if is_all_here else _LOOK_SECONDS)
            if messages:
                return Polled(messages)
            if is_all_here:
                return None

    def _is_all_here(self) -> bool:
        subscriber = self._subscriber
        if self._end is None:
            self._end = subscriber.log_end
        if self._end is None or not is_log_directory(REAL, subscriber.directory):
            return False
        durable = read_durable_end(REAL, subscriber.directory)
        # Only the durable end tells how far a filtered copy is complete.
        return max(subscriber.position, 0 if durable is None else durable.end) >= self._end
