"""How the subscriber for event loops ends: by errors of its handler, by cancellations, and with its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from merged_logs import Feeds

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
def test_what_a_handler_of_events_raises_ends_the_call_and_the_next_one_continues(
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
