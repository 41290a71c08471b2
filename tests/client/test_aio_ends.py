"""Asyncio clients end cleanly after handler errors, cancellations, and the end of their event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from merged_logs import Feeds
from receiving_node import make_pki, tls_of

import rt
import rt.aio
from rt.log.format.segment import SegmentId

WAIT_SECONDS = 120


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[rt.Publisher]:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
        publisher.publish_many([b"%d" % number for number in range(10)])
        publisher.flush()
        yield publisher


def waiting_threads() -> set[threading.Thread]:
    """Return the waiting threads of all subscribers. Other tests may have left some."""
    return {thread for thread in threading.enumerate() if thread.name == "rt-aio"}


def numbers(messages: list[rt.Message]) -> list[int]:
    return [message.number for message in messages]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError, ValueError),
        (StopIteration, RuntimeError),
        (asyncio.CancelledError, RuntimeError),
        (SystemExit, SystemExit),
    ],
)
def test_exception_of_event_handler_ends_poll_and_next_poll_continues(
    tmp_path: Path, raised: type[BaseException], expected: type[BaseException]
) -> None:
    feeds = Feeds(tmp_path, ["a"])
    for _ in range(2):
        feeds.publish("a", [b"v"] * 3, "t", [1, 2, 3])
        feeds.merge()
        feeds.log.roll()
    feeds.log.trim(SegmentId(0, 1))
    feeds.close()

    def fail(_: rt.events.Event) -> None:
        raise raised

    async def main() -> None:
        async with (
            asyncio.timeout(WAIT_SECONDS),
            rt.aio.Subscriber(feeds.path, "s", position=1, on_event=fail) as subscriber,
        ):
            with pytest.raises(expected):
                await subscriber.poll(timeout=None)
            assert [message.position for message in await subscriber.poll(timeout=None)] == [3, 4, 5]

    asyncio.run(main())


def test_subscriber_refuses_another_event_loop_except_to_close(publisher: rt.Publisher) -> None:
    before, subscriber = waiting_threads(), rt.aio.Subscriber(publisher.directory, "s")

    async def read() -> list[rt.Message]:
        async with asyncio.timeout(WAIT_SECONDS):
            return await subscriber.poll()

    assert numbers(asyncio.run(read())) == list(range(10))
    (thread,) = waiting_threads() - before
    publisher.publish(b"more")

    async def go_on() -> None:
        for call in (subscriber.poll(), anext(subscriber), subscriber.ack(0), subscriber.seek(0)):
            with pytest.raises(rt.Closed, match="another event loop"):
                await call
        await subscriber.close()

    asyncio.run(go_on())
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_publisher_refuses_wait_from_another_event_loop(tmp_path: Path) -> None:
    tls = tls_of(make_pki(tmp_path / "pki"), "feed")
    publisher = rt.aio.Publisher(tmp_path, "s", publisher_id="feed", endpoints=["localhost:1"], tls=tls)

    async def wait() -> None:
        with pytest.raises(rt.Closed, match="another event loop"):
            await asyncio.wait_for(publisher.wait(publisher.publish(b"one").number), WAIT_SECONDS)
        await publisher.close(0)

    asyncio.run(publisher.open())
    asyncio.run(wait())


class _SlowOpening:
    """Subscribers that open only when the test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[rt.Subscriber] = []
        self.may_open = threading.Event()
        real = rt.client.subscriber.Subscriber

        def open_slowly(*args: object, **options: object) -> rt.Subscriber:
            self.may_open.wait(WAIT_SECONDS)
            self.opened.append(real(*args, **options))  # type: ignore[arg-type]
            return self.opened[-1]

        monkeypatch.setattr(rt.client.subscriber, "Subscriber", open_slowly)


def test_cancelled_open_and_close_leave_no_subscriber_open(
    publisher: rt.Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, slow = waiting_threads(), _SlowOpening(monkeypatch)

    async def main() -> None:
        subscriber = rt.aio.Subscriber(publisher.directory, "s")
        opening = asyncio.create_task(subscriber.__aenter__())
        await asyncio.sleep(0)
        opening.cancel()
        while not subscriber._is_closed:
            await asyncio.sleep(0)
        opening.cancel()  # This cancels the closing, which the first cancel started.
        await asyncio.wait([opening])
        assert opening.cancelled()
        slow.may_open.set()
        while waiting_threads() - before:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), WAIT_SECONDS))
    with pytest.raises(rt.Closed):
        slow.opened[0].poll()


def test_position_is_available_after_cancelled_first_poll(
    publisher: rt.Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = _SlowOpening(monkeypatch)

    async def main() -> None:
        subscriber = rt.aio.Subscriber(publisher.directory, "s", position=7)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(subscriber.poll(), 0.01)
        slow.may_open.set()
        while subscriber.position != 7:
            await asyncio.sleep(0.01)
        assert numbers(await subscriber.poll()) == [7, 8, 9]
        await subscriber.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_SECONDS))


def test_subscriber_is_not_open_after_failed_open(tmp_path: Path) -> None:
    async def main() -> None:
        subscriber = rt.aio.Subscriber(tmp_path, "s")
        with pytest.raises(rt.LogNotFound):
            await subscriber.poll()
        with pytest.raises(rt.Closed, match="not open"):
            subscriber.stats()
        assert subscriber.log_end is None
        await subscriber.close()

    asyncio.run(main())
