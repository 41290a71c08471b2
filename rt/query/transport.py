"""Queries between streams: messages of a log in, messages of a publisher out, each exactly once.

    MessageSource    a subscriber: the sequence id of a message is its position
    MessageSink      a publisher: a message's number is its sequence id, under a dedup id

Laws. A source hands a message on again until it was taken. A sink acknowledges what is merged, or without
nodes what is on the disk; what it sends again after a recovery has the numbers that it had, and the nodes
merge each number once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection
from functools import partial
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote

from rt.errors import RtError, Timeout, WriteConflict
from rt.log.columns import Message
from rt.log.gather import as_bytes, check_size, check_topic, checked_stamp
from rt.publisher import Publisher
from rt.query.edges import OutputEdge
from rt.query.errors import QueryExists
from rt.query.reliable import RESUME, ReliableObserver
from rt.subscriber import Subscriber

logger = logging.getLogger("rt.query")

_AGAIN_S: Final = 0.1


class MessageSource:
    """The messages of a stream, each an `rt.Message`; one observer. `pump` it, in one thread.

    Takes what `rt.Subscriber` takes but for the position: the engine says that. To begin elsewhere than at
    position 0, say where in `first`, and `add_source(begin=None)`. With a `name` the subscriber acknowledges
    what checkpoints hold. With `topics` positions have gaps; what is missing is raised as `rt.Gap` then,
    unless `on_event` is given. Without, the engine notices (`SequenceGap`).
    """

    def __init__(
        self,
        path: Any,
        stream: str,
        *,
        first: Literal["earliest", "latest"] | None = None,
        topics: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        if first not in {"earliest", "latest", None}:
            raise ValueError(f"first={first!r}: use 'earliest' or 'latest', or leave it out: position 0")
        self._first: Final[Any] = 0 if first is None else first
        self.is_dense: Final = topics is None
        if self.is_dense:
            options.setdefault("on_event", _log_event)
        self._open: Final = partial(Subscriber, path, stream, topics=topics, **options)
        self._observer: ReliableObserver[Message] | None = None
        self._subscriber: Subscriber | None = None
        self._left: list[Message] = []
        self._to_acknowledge = -1
        self._is_disposed = False

    def subscribe(self, observer: ReliableObserver[Message], /) -> MessageSource:
        """`QueryExists` for a second one."""
        if self._observer is not None:
            raise QueryExists("the source has an observer", hint="Make another source for each.")
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        """From that position on, which `pump` hands out; 0 is where it begins."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._left = []
        self._subscriber = self._open(position=sequence_id or self._first)

    def acknowledge(self, sequence_id: int, /) -> None:
        """From any thread; a named subscriber acknowledges with the next `pump`, or when it is disposed."""
        self._to_acknowledge = max(self._to_acknowledge, sequence_id)

    def dispose(self) -> None:
        """Close the subscriber, once nobody pumps."""
        if not self._is_disposed and self._subscriber is not None:
            self._is_disposed = True
            try:
                self._acknowledge(self._subscriber)
            finally:
                self._subscriber.close()

    def pump(self, max_messages: int = 1000, timeout: float = 0.0) -> int:
        """Hand out up to so many messages, waiting `timeout` seconds for the first; how many.

        Raises what the subscriber and the observer raise: a message that was not taken comes again.
        """
        subscriber, observer = self._subscriber, self._observer
        if subscriber is None or observer is None or self._is_disposed:
            return 0
        self._acknowledge(subscriber)
        messages, self._left = self._left or subscriber.poll(max_messages, timeout), []
        taken = 0
        try:
            for message in messages:
                observer.on_next(message.position, message)
                taken += 1
        finally:
            self._left = messages[taken:]
        return taken

    def _acknowledge(self, subscriber: Subscriber) -> None:
        position, self._to_acknowledge = self._to_acknowledge + 1, -1
        if position > 0 and subscriber.name is not None:
            subscriber.ack(position)


class Outgoing(NamedTuple):
    """What is published of a value that a query emits."""

    value: bytes
    topic: str = ""
    timestamp_ns: int | None = None


def as_message(value: Any) -> tuple[bytes, str, int | None]:
    """For `add_sink(encode=…)`: bytes, an `Outgoing`, or text, which becomes UTF-8.

    `TypeError`, `rt.InvalidMessage` for what cannot be published: the query that emitted it ends.
    """
    if isinstance(value, str):
        value = value.encode()
    found = value if isinstance(value, Outgoing) else Outgoing(value)
    data = as_bytes(found.value)
    check_size(len(data))
    check_topic(found.topic)
    stamp = None if found.timestamp_ns is None else checked_stamp(found.timestamp_ns)
    return data, found.topic, stamp


class MessageSink:
    """Publishes what an output edge sends; made with `add_sink(encode=as_message)`.

    Takes what `rt.Publisher` takes. `endpoints` want a `dedup_id` of the certificate's, which nobody else
    uses: the output may then go on from another disk. `check_timeout`: how long to ask the nodes whether
    what they have merged under it is of this output (None: not at all); `rt.WriteConflict` if it is not, as
    after the loss of the engine's store.
    """

    def __init__(
        self,
        output: OutputEdge,
        path: Any,
        stream: str,
        *,
        dedup_id: str | None = None,
        check_timeout: float | None = 30.0,
        **options: Any,
    ) -> None:
        self._output: Final = output
        self._is_pushed: Final = bool(options.get("endpoints"))
        if self._is_pushed and dedup_id is None:
            raise ValueError("endpoints without a dedup_id: messages could be merged twice")
        if self._is_pushed and check_timeout is not None:
            tls, endpoints = options["tls"], tuple(options["endpoints"])
            _check_wanted(output, endpoints, tls, str(dedup_id), check_timeout)
        self.publisher: Final = Publisher(path, stream, dedup_id=dedup_id, **options)
        self._first: int | None = None
        """The first number of this life."""
        self._acknowledged = -1
        try:
            if not self._is_pushed:
                self._check_own()
            self._subscription = output.subscribe(self, "publisher")
            self._subscription.start(RESUME)
        except BaseException:
            self.publisher.close(linger=0)
            raise

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """Publish it under that number. What `Publisher.publish` raises: it was not taken."""
        data, topic, timestamp_ns = value
        if not self._is_pushed and sequence_id < self.publisher.next_number:
            return  # An earlier life published it, and its session is here.
        is_first = self._is_pushed and self._first is None
        self.publisher.publish(data, topic, timestamp_ns, sequence_id if is_first else None)
        if is_first:
            self._first = sequence_id

    def on_error(self, error: Exception, /) -> None:
        """Nothing is published of that."""
        logger.warning("output_failed error=%r", str(error))

    def on_completed(self) -> None:
        """Nothing is published of that."""

    def pump(self) -> None:
        """Acknowledge what is merged, or, without nodes, make all durable and acknowledge it."""
        if not self._is_pushed:
            self.publisher.flush()
            end = self.publisher.next_number
        elif self._first is None:
            return
        else:
            end = self.publisher.progress.merged
        end = min(end, self._output.buffer.end)  # An earlier life may have been ahead.
        if end - 1 > self._acknowledged:
            self._subscription.acknowledge(end - 1)
            self._acknowledged = end - 1

    def close(self, linger: float = 30.0) -> None:
        """As `Publisher.close`; what is not acknowledged is published again by the next life."""
        self.publisher.close(linger)

    def _check_own(self) -> None:
        """Without a dedup id, numbers are the session's own: it must be where the output is."""
        number, buffer = self.publisher.next_number, self._output.buffer
        is_ahead = self._output.release == "commit" and number > buffer.end
        if number < buffer.low or is_ahead:
            raise WriteConflict(
                "the session and the output do not belong together",
                where=self.publisher.directory,
                got=f"number {number} next",
                wanted=f"{buffer.low} to {buffer.end}",
                hint="The store or the session was lost or set back: go on under another publisher_id.",
            )
        self._output.expect(number)


def _check_wanted(
    output: OutputEdge, endpoints: tuple[str, ...], tls: Any, dedup_id: str, timeout: float
) -> None:
    """`rt.WriteConflict` unless the nodes want next what this output may send; a node may be behind."""
    buffer, deadline = output.buffer, time.monotonic() + timeout
    while True:
        try:
            wanted = _wanted(endpoints, tls, dedup_id)
        except RtError as error:
            if time.monotonic() > deadline:
                raise Timeout("no node says what is merged", where=endpoints, got=str(error)) from error
        else:
            is_ahead = output.release == "commit" and wanted > buffer.end
            if wanted >= buffer.low and not is_ahead:
                output.expect(wanted)
                return
            if is_ahead or time.monotonic() > deadline:
                raise WriteConflict(
                    f"what is merged under the dedup id {dedup_id} is not of this output",
                    got=f"number {wanted} wanted next",
                    wanted=f"{buffer.low} to {buffer.end}",
                    hint="The store was lost or set back, or others use that dedup id: take another one.",
                )
        time.sleep(_AGAIN_S)


def _wanted(endpoints: tuple[str, ...], tls: Any, dedup_id: str) -> int:
    from rt.net.rest import ask, check

    answer = asyncio.run(ask(endpoints, tls, "GET", f"/dedup-rt-clients?name={quote(dedup_id)}"))
    found = json.loads(check(answer).body)
    return int(found[0]["wanted"]) if found else 0


def _log_event(event: object) -> None:
    logger.warning("source_event %r", event)
