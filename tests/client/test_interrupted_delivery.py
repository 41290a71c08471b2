"""Delivery interrupted by a pause, close, fork or error: no message is skipped, `position` is exact."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rt
from rt.client.follow_reader import DeliveryCounter
from rt.log.scan.message_batch import MessageBatch

COUNT = 10


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[rt.Publisher]:
    with rt.Publisher(tmp_path, "stream", publisher_id="feed", linger_ms=0) as publisher:
        publisher.publish_many([b"%d" % number for number in range(COUNT)])
        publisher.flush()
        yield publisher


def on_first_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Run `act` after the first batch is read and before it is returned."""
    add = DeliveryCounter.add
    acts = [act]

    def counted(self: DeliveryCounter, batch: MessageBatch) -> None:
        add(self, batch)
        if acts:
            acts.pop()()

    monkeypatch.setattr(DeliveryCounter, "add", counted)


@pytest.mark.parametrize("most", [None, 1, 4, COUNT])
def test_pause_during_read_loses_no_message_for_any_batch_limit(
    publisher: rt.Publisher, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        on_first_read(monkeypatch, subscriber.pause)
        assert subscriber.next_batch(0, most) is None
        assert subscriber.position == subscriber.stats().position == subscriber.stats().messages == 0
        subscriber.resume()
        got: list[int] = []
        while (batch := subscriber.next_batch(0, most)) is not None:
            assert most is None or len(batch) <= most
            got += batch.numbers.tolist()
            assert subscriber.position == len(got)
        assert got == list(range(COUNT))


@pytest.mark.parametrize("most", [None, 1, 4, COUNT])
def test_close_during_read_does_not_advance_position(
    publisher: rt.Publisher, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    subscriber = rt.Subscriber(publisher.directory, "stream", name="sub")

    def close() -> None:
        closer = threading.Thread(target=subscriber.close)
        closer.start()
        while not subscriber._gate.is_closed:
            pass
        closers.append(closer)

    closers: list[threading.Thread] = []
    on_first_read(monkeypatch, close)
    assert subscriber.next_batch(0, most) is None
    closers[0].join()
    assert subscriber.position == subscriber.stats().position == subscriber.stats().messages == 0
    with pytest.raises(rt.InvalidOption, match="not delivered"):
        subscriber.ack(1)
    assert subscriber.next_batch(0) is None
    assert subscriber.position == 0


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], rt.LogReader]:
    """Return a function that opens a reader of messages of a given size. The first copy of the value of
    message 3 fails.
    """
    each, fails = MessageBatch._each_value, [True]

    def failing(self: MessageBatch) -> Iterator[bytes]:
        for value in each(self):
            if value[0] == 3 and fails and fails.pop():
                raise MemoryError
            yield value

    def open_reader(size: int) -> rt.LogReader:
        with rt.Publisher(tmp_path, "stream", publisher_id="feed") as publisher:
            publisher.publish_many([bytes([number]) * size for number in range(COUNT)])
        return rt.LogReader(publisher.directory)

    monkeypatch.setattr(MessageBatch, "_each_value", failing)
    return open_reader


@pytest.mark.parametrize("size", [10_000, 200_000])
def test_message_is_delivered_next_after_memory_error_while_copying_it(
    large: Callable[[int], rt.LogReader], size: int
) -> None:
    """Copying takes most of the time, so an out-of-memory error or an interrupt usually hits it."""
    got: list[int] = []
    with large(size) as reader:
        messages = iter(reader)
        with pytest.raises(MemoryError):
            got.extend(next(messages).number for _ in range(COUNT))  # The messages before the error are kept.
        assert reader.position == len(got) == 3
        got += [message.number for message in messages]
    assert got == list(range(COUNT))


@pytest.mark.parametrize("size", [10_000, 200_000])
def test_poll_out_of_memory_returns_copied_messages_and_next_poll_continues(
    large: Callable[[int], rt.LogReader], size: int
) -> None:
    with large(size) as reader:
        got, errors = [message.number for message in reader.poll()], 0
        assert got == [0, 1, 2]
        while len(got) < COUNT or not errors:
            assert reader.position == len(got)
            try:
                got += [message.number for message in reader.poll(2)]
            except MemoryError:
                errors += 1
        assert got == list(range(COUNT))
        assert reader.poll() == []
    assert errors == 1


class Forked:
    """A subscriber in a process and in its forked child. The child's request for the next message must be
    refused.
    """

    def __init__(self, subscriber: rt.Subscriber) -> None:
        self._subscriber = subscriber
        self._messages = iter(subscriber)
        self._child = -1

    def fork(self) -> None:
        self._child = os.fork()

    def next(self) -> int:
        """Return the number of the next message. The child exits with 42 if it is refused and its position
        has not changed.
        """
        position = self._subscriber.position
        try:
            return next(self._messages).number
        except rt.Closed as error:
            is_refusal = "belongs to the parent" in str(error) and self._subscriber.position == position
            if is_refusal and self._child == 0:  # pragma: no cover
                os._exit(42)
            raise
        finally:
            if self._child == 0:  # pragma: no cover
                os._exit(1)

    def exit_status_of_child(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


def test_iteration_raises_closed_in_child_forked_between_messages_of_batch(
    publisher: rt.Publisher,
) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        forked = Forked(subscriber)
        got = [forked.next() for _ in range(4)]
        forked.fork()
        got += [forked.next() for _ in range(COUNT - 4)]
        assert forked.exit_status_of_child() == 42
    assert got == list(range(COUNT))


def test_batch_is_not_delivered_in_child_forked_during_its_read(
    publisher: rt.Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rt.Subscriber(publisher.directory, "stream") as subscriber:
        forked = Forked(subscriber)
        on_first_read(monkeypatch, forked.fork)
        got = [forked.next() for _ in range(COUNT)]
        assert forked.exit_status_of_child() == 42
    assert got == list(range(COUNT))
