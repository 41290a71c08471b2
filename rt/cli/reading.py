"""Where `rt sub` reads from: a log, or a subscriber's place in it or in what nodes have of it.

Law: only what was written is acknowledged, whatever the reader has looked at since.
"""

from __future__ import annotations

import time
from typing import Protocol

from rt.cli.outputs import Polled, Rows
from rt.cli.told import Told
from rt.log.directory import is_log_directory, read_durable_end
from rt.log.disk import REAL
from rt.log.reader import LogReader, Place
from rt.subscriber import Subscriber

_POLL_MESSAGES = 4096
_ACKNOWLEDGE_SECONDS = 1.0
"""How often a named subscriber that never comes to rest acknowledges: each time costs two syncs."""
_LOOK_SECONDS = 0.1
"""How often to find out whether what was on its way is here, or was filtered out."""


class Source(Protocol):
    """Where messages come from."""

    def next(self, most: int) -> Rows | None:
        """Up to `most` messages; None at the end, or never."""

    def written(self) -> None:
        """What `next` gave has been written."""

    def acknowledge(self) -> None:
        """What is written need not be given again."""

    def close(self) -> None:
        """Release the log."""


class Unnamed:
    """Reads a log, and remembers nothing."""

    def __init__(
        self, path: str, position: Place | None, topics: tuple[str, ...], told: Told, *, is_following: bool
    ) -> None:
        self._reader = LogReader(
            path,
            position="earliest" if position is None else position,
            follow=is_following,
            topics=topics or None,
            on_event=told,
        )

    def next(self, most: int) -> Rows | None:
        """As they were read together."""
        return self._reader.next_batch(None, most)

    def written(self) -> None:
        """Nothing to do."""

    def acknowledge(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


class Named:
    """Reads a log as a named subscriber. It acknowledges when there is nothing to do, or once a second."""

    def __init__(self, subscriber: Subscriber, *, is_following: bool) -> None:
        self._subscriber = subscriber
        self._is_following = is_following
        self._done = self._acknowledged = self._subscriber.position
        self._next_time = time.monotonic() + _ACKNOWLEDGE_SECONDS

    def next(self, most: int) -> Rows | None:
        """Up to a few thousand."""
        messages = self._subscriber.poll(min(most, _POLL_MESSAGES), 0.0)
        if not messages:
            self.acknowledge()
            if not self._is_following:
                return None
            messages = self._subscriber.poll(min(most, _POLL_MESSAGES), None)
        return Polled(messages)

    def written(self) -> None:
        """Note how far that is."""
        self._done = self._subscriber.position
        if time.monotonic() >= self._next_time:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Remember it, durably, if it moved."""
        if self._done != self._acknowledged and self._subscriber.name is not None:
            self._subscriber.ack(self._done)
            self._acknowledged = self._done
        self._next_time = time.monotonic() + _ACKNOWLEDGE_SECONDS

    def close(self) -> None:
        """Close the reader."""
        self._subscriber.close()


class Pulled(Named):
    """What a subscriber with endpoints gets, named or not. The end is what a node had when it was reached."""

    def __init__(self, subscriber: Subscriber, *, is_following: bool) -> None:
        super().__init__(subscriber, is_following=is_following)
        self._end: int | None = None

    def next(self, most: int) -> Rows | None:
        """As the base class; not following, it waits for what is still on its way."""
        if self._is_following:
            return super().next(most)
        while True:
            is_all_here = self._is_all_here()  # Before the look, for it may come in between.
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
        # Of a filtered copy only the durable end says how far it is complete.
        return max(subscriber.position, 0 if durable is None else durable.end) >= self._end
