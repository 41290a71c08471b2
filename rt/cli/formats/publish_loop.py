"""Feed a publisher: group messages of one topic, and wait if the disk is full.

Invariant: every message that was added is published once, in order, or the caller learns how many were
published. A full disk loses no message and repeats none.
"""

from __future__ import annotations

import time
from typing import Literal

from msgspec import Struct

from rt.cli.formats.console import Bar, report
from rt.cli.signals import Interrupts
from rt.client.publisher import Publisher
from rt.errors import DiskFull
from rt.log.format.headers import Headers

OnFull = Literal["wait", "fail"]

_RUN_MESSAGES = 4096
_RUN_BYTES = 2**20
_RETRY_SECONDS = 0.2


class PublishedCount(Struct):
    """What was published: messages, bytes, the range of numbers, and whether all is synced."""

    message_count: int = 0
    size_bytes: int = 0
    first: int | None = None
    end: int | None = None
    is_flushed: bool = False


class PublishLoop:
    """Passes messages to `publisher` and counts them in `fed`, and in `bar` if it counts messages."""

    def __init__(
        self,
        publisher: Publisher,
        interrupts: Interrupts,
        fed: PublishedCount,
        *,
        on_full: OnFull,
        bar: Bar | None,
        headers: Headers = (),
    ) -> None:
        self.fed = fed
        self._publisher = publisher
        self._interrupts = interrupts
        self._on_full = on_full
        self._bar = bar
        self._is_full = False
        self._topic = ""
        self._values: list[bytes] = []
        self._stamps: list[int] | None = None
        self._default_headers = headers
        self._headers: list[Headers] = []
        self._bytes = 0

    def add(self, value: bytes, topic: str, timestamp_ns: int | None = None, headers: Headers = ()) -> None:
        """Add one message. It is published together with its neighbours of the same topic."""
        if self._values and (topic != self._topic or (timestamp_ns is None) != (self._stamps is None)):
            self.push()
        if not self._values:
            self._topic, self._stamps = topic, None if timestamp_ns is None else []
        self._values.append(value)
        self._headers.append(headers or self._default_headers)
        self._bytes += len(value)
        if self._stamps is not None and timestamp_ns is not None:
            self._stamps.append(timestamp_ns)
        if len(self._values) >= _RUN_MESSAGES or self._bytes >= _RUN_BYTES:
            self.push()

    def add_many(self, values: list[bytes], topic: str) -> None:
        """Publish many messages, now."""
        self.push()
        self._publish(values, topic, None, [self._default_headers] * len(values))

    def push(self) -> None:
        values, stamps, headers = self._values, self._stamps, self._headers
        self._values, self._stamps, self._headers, self._bytes = [], None, [], 0
        if values:
            self._publish(values, self._topic, stamps, headers)

    def finish(self) -> None:
        """Publish the messages that were added. On return all of them are synced to disk."""
        self.push()
        while True:
            try:
                self._publisher.flush()
            except DiskFull as error:
                self._wait(error)
            else:
                self.fed.is_flushed = True
                return

    def _publish(
        self, values: list[bytes], topic: str, stamps: list[int] | None, headers: list[Headers]
    ) -> None:
        while True:
            try:
                own = headers if any(headers) else ()
                self._count(values, self._publisher.publish_many(values, topic, stamps, own))
            except DiskFull as error:
                done = len(error.accepted)
                self._count(values[:done], error.accepted)
                values, stamps = values[done:], None if stamps is None else stamps[done:]
                headers = headers[done:]
                self._wait(error)
            else:
                self._is_full = False
                return

    def _count(self, values: list[bytes], numbers: range) -> None:
        if not numbers:
            return
        fed = self.fed
        fed.first = numbers.start if fed.first is None else fed.first
        fed.end = numbers.stop
        fed.message_count += len(numbers)
        fed.size_bytes += sum(map(len, values))
        if self._bar is not None:
            self._bar.add(len(numbers))

    def _wait(self, error: DiskFull) -> None:
        """Wait a little for space; raise `error` if the command must not wait."""
        if self._on_full == "fail":
            raise error
        if not self._is_full:
            self._is_full = True
            report(f"{error} Waiting for space.")
        with self._interrupts.waiting():
            time.sleep(_RETRY_SECONDS)
