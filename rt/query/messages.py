"""Queries between streams: from messages of a merged log to messages of a publisher, each exactly once.

    MessageSource    a subscriber: the sequence id of a message is its position
    MessageSink      a publisher: the number of a message is its sequence id, under a dedup id

Invariants:
- A source sends a message again until it was accepted.
- A sink acknowledges messages when they are merged. Without nodes it acknowledges messages that are on disk.
  Messages that are sent again after a recovery have the same numbers, and the nodes merge each number once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from rt.client.publisher import Publisher
from rt.client.subscriber import Subscriber
from rt.errors import Fenced, InvalidOption, RtError, Timeout, WriteConflict
from rt.log.scan.message_batch import Message
from rt.log.write.batcher import as_bytes, check_size, check_topic, checked_stamp
from rt.query.checkpoint.edge import OutputEdge
from rt.query.core.errors import QueryExists
from rt.query.core.reliable import RESUME, ReliableObserver
from rt.query.monitoring.dead_letters import DeadLetter

logger = logging.getLogger("rt.query")

_RETRY_S: Final = 0.1


class MessageSource:
    """The messages of a stream, each an `rt.Message`, for one observer. Call `pump` in one thread.

    Accepts the options of `rt.Subscriber`, except the position, which the engine sets. To start at another
    position than 0, give `first`, and `add_source(begin=None)`. With a `name` the subscriber acknowledges the
    messages that checkpoints hold. With `topics` positions have gaps, so missing messages raise `rt.Gap`
    unless `on_event` is given. Without `topics` the engine finds gaps (`SequenceGap`). If a forced reset
    replaced messages that were processed, `pump` raises `rt.Diverged`.
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
            raise InvalidOption(f"first must be 'earliest', 'latest' or None (position 0), got {first!r}")
        self._first: Final[Any] = 0 if first is None else first
        self.is_dense: Final = topics is None
        if self.is_dense:
            options.setdefault("on_event", _log_event)
        self._open: Final = partial(Subscriber, path, stream, topics=topics, **options)
        self._observer: ReliableObserver[Message] | None = None
        self._subscriber: Subscriber | None = None
        self._stored_epoch: int | None = None
        self._left: list[Message] = []
        self._to_acknowledge = -1
        self._acknowledged = 0
        """The position that the subscriber acknowledged: the id after the last one."""
        self._is_disposed = False

    def subscribe(self, observer: ReliableObserver[Message], /) -> MessageSource:
        """Set the observer. `QueryExists` if there is one already."""
        if self._observer is not None:
            raise QueryExists("the source has an observer", hint="Make a source for each observer.")
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        """Send messages from that position on; 0: from the configured first position."""
        epoch = self.epoch
        if self._subscriber is not None:
            self._subscriber.close()
        self._left = []
        if sequence_id:
            self._subscriber = self._open(position=sequence_id, epoch=epoch)
        else:
            self._subscriber = self._open(position=self._first)

    def acknowledge(self, sequence_id: int, /) -> None:
        """May be called from any thread.

        A named subscriber acknowledges at the next `pump` or at `dispose`.
        """
        self._to_acknowledge = max(self._to_acknowledge, sequence_id)

    @property
    def epoch(self) -> int | None:
        """The epoch number of the messages so far. Set it before `start` to the epoch of an earlier run."""
        return self._stored_epoch if self._subscriber is None else self._subscriber.epoch

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._stored_epoch = epoch

    @property
    def end(self) -> int | None:
        """The position of the next message of the log, as far as this machine knows."""
        subscriber = self._subscriber
        return None if subscriber is None else subscriber.stats().log_end

    def dispose(self) -> None:
        """Close the subscriber. No thread may be in `pump`. If it raises, another call tries again."""
        if not self._is_disposed and self._subscriber is not None:
            try:
                self._acknowledge(self._subscriber)
            finally:
                self._subscriber.close()
                self._is_disposed = True

    def pump(self, max_messages: int = 1000, timeout: float = 0.0) -> int:
        """Send up to `max_messages`. Returns how many were accepted.

        Waits `timeout` seconds for the first one. Raises what the subscriber and the observer raise. A
        message that was not accepted is sent again.
        """
        subscriber, observer = self._subscriber, self._observer
        if subscriber is None or observer is None or self._is_disposed:
            return 0
        self._acknowledge(subscriber)
        messages, self._left = self._left or subscriber.poll(max_messages, timeout), []
        accepted = 0
        try:
            for message in messages:
                observer.on_next(message.position, message)
                accepted += 1
        finally:
            self._left = messages[accepted:]
        return accepted

    def _acknowledge(self, subscriber: Subscriber) -> None:
        position = self._to_acknowledge + 1  # Only `acknowledge`, possibly in another thread, sets it.
        if position > self._acknowledged and subscriber.name is not None:
            subscriber.ack(position)
            self._acknowledged = position


class OutgoingMessage(NamedTuple):
    """The message to publish for a value that a query emits."""

    value: bytes
    topic: str = ""
    timestamp_ns: int | None = None


def as_message(value: Any) -> tuple[bytes, str, int | None]:
    """For `add_sink(encode=…)`: accepts bytes, str (encoded as UTF-8) or an `OutgoingMessage`.

    A value that cannot be published raises `TypeError` or `rt.InvalidMessage`. The error policy of the query
    handles it.
    """
    if isinstance(value, str):
        value = value.encode()
    found = value if isinstance(value, OutgoingMessage) else OutgoingMessage(value)
    data = as_bytes(found.value)
    check_size(len(data))
    check_topic(found.topic)
    stamp = None if found.timestamp_ns is None else checked_stamp(found.timestamp_ns)
    return data, found.topic, stamp


def dead_letter_message(letter: DeadLetter, topic: str = "dead-letters") -> tuple[bytes, str, int | None]:
    """For `add_dead_letters(encode=…)`: the letter as JSON, in a topic."""
    return as_message(OutgoingMessage(json.dumps(letter.row()).encode(), topic))


class MessageSink:
    """Publishes the values of an output edge that was made with `add_sink(encode=as_message)`.

    Accepts the options of `rt.Publisher`. `endpoints` need a `dedup_id` that the certificate allows and that
    no other publisher uses; the output can then continue on another disk. `check_timeout`: seconds to ask the
    nodes whether the numbers merged under the dedup id belong to this output. None: do not ask. If they do
    not belong to it, for example after the engine's store was lost, `rt.WriteConflict` is raised.
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
            raise InvalidOption("endpoints need a dedup_id: without it messages could be merged twice")
        if self._is_pushed and check_timeout is not None:
            tls, endpoints = options["tls"], tuple(options["endpoints"])
            _check_next_number(output, endpoints, tls, str(dedup_id), check_timeout)
        self.publisher: Final = Publisher(path, stream, dedup_id=dedup_id, **options)
        self._first: int | None = None
        """The first number published by this run."""
        self._acknowledged = -1
        try:
            if not self._is_pushed:
                self._check_session_numbers()
            self._subscription = output.subscribe(self, "publisher")
            self._subscription.start(RESUME)
        except BaseException:
            self.publisher.close(timeout=0)
            raise

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """Publish the value under its number. If `Publisher.publish` raises, the value was not accepted."""
        data, topic, timestamp_ns = value
        if not self._is_pushed and sequence_id < self.publisher.next_number:
            return  # An earlier run published it in this session.
        is_first = self._is_pushed and self._first is None
        self.publisher.publish(data, topic, timestamp_ns, sequence_id if is_first else None)
        if is_first:
            self._first = sequence_id

    def on_error(self, error: Exception, /) -> None:
        logger.warning("output_failed error=%r", str(error))

    def on_completed(self) -> None: ...

    def pump(self) -> None:
        """Acknowledge merged messages; without nodes, flush and acknowledge all messages.

        Raises `rt.Fenced` if another publisher took the session over: the rest would never be merged.
        """
        if not self._is_pushed:
            self.publisher.flush()
            end = self.publisher.next_number
        elif self._first is None:
            return
        else:
            end = self.publisher.progress.merged
        end = min(end, self._output.buffer.end)  # An earlier run may have published later ids.
        if end - 1 > self._acknowledged:
            self._subscription.acknowledge(end - 1)
            self._acknowledged = end - 1
        elif self._is_pushed and end < self.publisher.next_number:
            error = self.publisher.status().error
            if isinstance(error, Fenced):
                raise error

    def close(self, timeout: float = 30.0) -> None:
        """As `Publisher.close`. The next run publishes the unacknowledged values again."""
        self.publisher.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.publisher.__exit__(kind, error, traceback)

    def _check_session_numbers(self) -> None:
        """Check that the numbers match the output's ids: without a dedup id they are the numbers of the
        session.
        """
        number, output = self.publisher.next_number, self._output
        if number < output.buffer.low or _is_ahead(number, output):
            what, where = "the session does not match the output", self.publisher.directory
            hint = "The store or the session was lost or restored from a backup. Use another publisher_id."
            raise _conflict(number, output, what, where=where, hint=hint)
        output.expect(number)


def _check_next_number(
    output: OutputEdge, endpoints: tuple[str, ...], tls: Any, dedup_id: str, timeout: float
) -> None:
    """Raise `rt.WriteConflict` unless the next number to merge is one that this output may send.

    Asks again until `timeout`, because a node may lag.
    """
    from rt.net.rest_client import ask_next_number

    deadline = time.monotonic() + timeout
    while True:
        try:
            next_number = asyncio.run(ask_next_number(endpoints, tls, dedup_id))
        except RtError as error:
            if time.monotonic() > deadline:
                raise Timeout("no node reported what is merged", where=endpoints, got=str(error)) from error
        else:
            is_ahead = _is_ahead(next_number, output)
            if next_number >= output.buffer.low and not is_ahead:
                output.expect(next_number)
                return
            if is_ahead or time.monotonic() > deadline:
                what = f"messages merged under dedup id {dedup_id} are not of this output"
                hint = "The store was lost or restored, or the dedup id is used elsewhere. Use a new one."
                raise _conflict(next_number, output, what, hint=hint)
        time.sleep(_RETRY_S)


def _is_ahead(number: int, output: OutputEdge) -> bool:
    """Whether more was published than checkpoints hold. False for release="now", where this is allowed."""
    return output.release == "commit" and number > output.buffer.end


def _conflict(number: int, output: OutputEdge, what: str, **details: Any) -> WriteConflict:
    expected = f"{output.buffer.low} to {output.buffer.end}"
    return WriteConflict(what, got=f"next number {number}", expected=expected, **details)


def _log_event(event: object) -> None:
    logger.warning("source_event %r", event)
