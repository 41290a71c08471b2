"""The asyncio subscriber never blocks its event loop, and cancelled calls lose no messages."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pull_source import pull_source
from receiving_node import make_pki, tls_of

import rt
import rt.aio

WAIT_SECONDS = 120


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[rt.Publisher]:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
        publisher.publish_many([b"%d" % number for number in range(10)])
        publisher.flush()
        yield publisher


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await main()

    asyncio.run(bounded())


def numbers(messages: list[rt.Message]) -> list[int]:
    return [message.number for message in messages]


def test_messages_are_delivered_singly_in_lists_and_in_batches(publisher: rt.Publisher) -> None:
    async def main() -> None:
        async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
            assert numbers([await anext(subscriber), await anext(subscriber)]) == [0, 1]
            assert subscriber.position == 2
            assert numbers(await subscriber.poll(3)) == [2, 3, 4]
            assert subscriber.position == 5
            batch = await anext(subscriber.batches())
            assert batch.numbers.tolist() == [5, 6, 7, 8, 9]
            assert await subscriber.poll(timeout=0) == []
            publisher.publish(b"next")
            async for message in subscriber:
                assert message.number == 10
                break
            assert subscriber.position == 11

    run(main)


def test_event_loop_keeps_running_while_poll_waits(publisher: rt.Publisher) -> None:
    async def main() -> None:
        async with rt.aio.Subscriber(publisher.directory, "s", position="latest") as subscriber:
            waiting = asyncio.ensure_future(subscriber.poll(timeout=None))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not waiting.done()
            publisher.publish(b"x")
            assert numbers(await waiting) == [10]

    run(main)


def test_seek_discards_read_ahead_messages_and_ends_waiting_poll(publisher: rt.Publisher) -> None:
    async def main() -> None:
        async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
            assert numbers([await anext(subscriber)]) == [0]
            await subscriber.seek(7)
            assert subscriber.position == 7
            assert numbers(await subscriber.poll(1)) == [7]
            await subscriber.seek("earliest")
            assert numbers([await anext(subscriber), await anext(subscriber)]) == [0, 1]
            await subscriber.seek("latest")
            waiting = asyncio.ensure_future(subscriber.poll(timeout=None))
            for _ in range(100):
                await asyncio.sleep(0)
            await subscriber.seek(9)
            assert numbers(await waiting) == [9]
            published = (await _from(subscriber, 0))[-1].timestamp_ns
            await subscriber.seek(datetime.fromtimestamp(published // 10**9, UTC))
            assert (await subscriber.poll(1))[0].timestamp_ns >= published // 10**9 * 10**9
            with pytest.raises(rt.InvalidOption):
                await subscriber.seek("sideways")  # type: ignore[arg-type]

    run(main)


def test_close_leaves_position_after_last_delivered_message(publisher: rt.Publisher) -> None:
    async def main() -> None:
        async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
            assert numbers([await anext(subscriber), await anext(subscriber)]) == [0, 1]
        assert subscriber.position == 2
        async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
            assert numbers(await subscriber.poll(3)) == [0, 1, 2]
        assert subscriber.position == 3

    run(main)


def test_failed_seek_skips_no_messages(publisher: rt.Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise rt.StorageError("the disk failed")

    async def main() -> None:
        async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
            assert numbers([await anext(subscriber)]) == [0]
            with monkeypatch.context() as patch:
                patch.setattr("rt.client.follow_reader.LogReader", fail)
                with pytest.raises(rt.StorageError, match="the disk failed"):
                    await subscriber.seek("latest")
            assert subscriber.position == 1
            assert numbers(await subscriber.poll()) == list(range(1, 10))

    run(main)


def test_messages_skipped_by_seek_are_not_counted_as_delivered(publisher: rt.Publisher) -> None:
    async def main() -> None:
        async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
            await anext(subscriber)
            await subscriber.seek(7)
            assert subscriber.stats().messages == 1
            assert len(await subscriber.poll(2)) == 2
            await subscriber.seek(0)
            assert subscriber.stats().messages == 3
            assert len(await subscriber.poll()) == 10
            assert subscriber.stats().messages == 13

    run(main)


async def _from(subscriber: rt.aio.Subscriber, position: int) -> list[rt.Message]:
    await subscriber.seek(position)
    return await subscriber.poll(10)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_messages_are_delivered_once_and_in_order_despite_cancellations(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chosen = random.Random(seed)

    async def main() -> None:
        with rt.Publisher(tmp_path_factory.mktemp("log"), "s", publisher_id="feed", linger_ms=0) as publisher:
            got: list[int] = []

            async def publish() -> None:
                for size in [chosen.randint(1, 2000) for _ in range(10)]:
                    publisher.publish_many([b"x"] * size)
                    await asyncio.sleep(0.001 * chosen.random())

            async def draw(subscriber: rt.aio.Subscriber) -> None:
                match chosen.randrange(3):
                    case 0:
                        got.extend(numbers(await subscriber.poll(chosen.randint(1, 500), None)))
                    case 1:
                        count = chosen.randint(1, 1500)
                        async for message in subscriber:
                            got.append(message.number)
                            count -= 1
                            if not count:
                                break
                    case 2:
                        async for batch in subscriber.batches():
                            got.extend(batch.numbers.tolist())
                            break

            publishing = asyncio.ensure_future(publish())
            async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
                while not publishing.done() or len(got) < publisher.next_number:
                    drawing = asyncio.ensure_future(draw(subscriber))
                    for _ in range(chosen.randint(0, 5)):
                        await asyncio.sleep(0)
                    if chosen.random() < 0.5:
                        drawing.cancel()
                    await asyncio.wait([drawing], timeout=0.01 * chosen.random())
                    drawing.cancel()
                    await asyncio.wait([drawing])
                    if not drawing.cancelled():
                        drawing.result()
            assert got == list(range(publisher.next_number))

    run(main)


def test_named_subscriber_acknowledges_while_poll_waits(publisher: rt.Publisher) -> None:
    async def main() -> None:
        async with rt.aio.Subscriber(publisher.directory, "s", name="sink") as subscriber:
            with pytest.raises(ValueError, match="not delivered"):
                await subscriber.ack(1)
            await subscriber.poll()
            waiting = asyncio.ensure_future(subscriber.poll(timeout=None))
            await asyncio.sleep(0)
            for position in (4, 5, 6):
                await subscriber.ack(position)
            assert not waiting.done()
            publisher.publish(b"x")
            assert numbers(await waiting) == [10]
        async with rt.aio.Subscriber(publisher.directory, "s", name="sink") as subscriber:
            assert subscriber.position == 6
            assert numbers(await subscriber.poll()) == [6, 7, 8, 9, 10]

    run(main)


def test_paused_subscriber_delivers_no_messages_and_loses_none(publisher: rt.Publisher) -> None:
    async def main() -> None:
        async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
            assert (await anext(subscriber)).number == 0
            subscriber.pause()
            assert await subscriber.poll(timeout=0) == []
            waiting = asyncio.ensure_future(anext(subscriber))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not waiting.done()
            subscriber.resume()
            assert (await waiting).number == 1
            assert numbers(await subscriber.poll()) == list(range(2, 10))

    run(main)


def test_close_ends_iteration_of_active_or_paused_subscriber(publisher: rt.Publisher) -> None:
    async def main() -> None:
        for is_paused in (False, True):
            subscriber = rt.aio.Subscriber(publisher.directory, "s", position="latest")
            if is_paused:
                subscriber.pause()
            following = asyncio.ensure_future(_all(subscriber))
            for _ in range(10):
                await asyncio.sleep(0)
            await subscriber.close()
            await subscriber.close()
            assert await following == []
            assert await subscriber.poll() == []
            with pytest.raises(rt.Closed):
                await subscriber.ack(0)

    run(main)


async def _all(subscriber: rt.aio.Subscriber) -> list[rt.Message]:
    return [message async for message in subscriber]


def test_errors_of_opening_are_raised_by_awaited_calls(tmp_path: Path) -> None:
    async def main() -> None:
        for _ in range(2):
            with pytest.raises(rt.LogNotFound):
                async with rt.aio.Subscriber(tmp_path, "s"):
                    pass
        with pytest.raises(rt.InvalidName):
            await rt.aio.Subscriber(tmp_path, "../s").poll()

    run(main)


def test_unclosed_subscriber_does_not_keep_process_running(publisher: rt.Publisher) -> None:
    program = """
import asyncio, sys
import rt.aio
async def main():
    subscriber = rt.aio.Subscriber(sys.argv[1], "s", position="latest")
    print(await subscriber.poll(timeout=0.01))
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, publisher.directory], capture_output=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (b"[]\n", b"")


@pytest.mark.slow
def test_subscriber_pulls_from_node(tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")
    with pull_source(tmp_path / "node", pki) as source:

        async def main() -> None:
            source.publish(b"one")
            tls = tls_of(pki, "sub")
            endpoints = [source.endpoint]
            async with rt.aio.Subscriber(
                tmp_path, "s", endpoints=endpoints, tls=tls, connect_timeout=None
            ) as subscriber:
                assert (await anext(subscriber)).value == b"one"
            async with rt.aio.Subscriber(
                tmp_path / "wrong",
                "s",
                endpoints=endpoints,
                tls=tls_of(pki, "feed"),
                connect_timeout=None,
            ) as subscriber:
                with pytest.raises(rt.CertificateError):
                    await anext(subscriber)

        run(main)


FORKED = """
import asyncio, os, sys
import rt
import rt.aio


def is_refusal(error):
    return isinstance(error, rt.Closed) and "parent process" in str(error)


async def refused(use):
    try:
        await asyncio.wait_for(use(), 30)
    except rt.RtError as error:
        return is_refusal(error)
    except TimeoutError:
        pass
    return False


async def child(subscriber):
    uses = [
        lambda: subscriber.poll(timeout=1),
        subscriber.next_batch,
        subscriber.__anext__,
        lambda: subscriber.ack(1),
        lambda: subscriber.trim(1),
        lambda: subscriber.seek(0),
    ]
    found = [await refused(use) for use in uses]
    await subscriber.close()
    return all(found)


async def main():
    plain = rt.Subscriber(sys.argv[1], "s")
    assert len(plain.poll(10, 60)) == 10
    async with rt.aio.Subscriber(sys.argv[1], "s", name="a") as subscriber:
        assert len(await subscriber.poll(10, 60)) == 10
        reading = asyncio.ensure_future(subscriber.next_batch())  # The thread waits, with its locks.
        while subscriber._reading is None:
            await asyncio.sleep(0)
        if os.fork() == 0:
            asyncio._set_running_loop(None)
            is_right = asyncio.run(child(subscriber))
            try:
                plain.poll(timeout=60)
                is_right = False
            except rt.Closed as error:
                is_right = is_right and is_refusal(error)
            plain.close()
            os._exit(7 if is_right else 1)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
        await subscriber.ack(5)
        reading.cancel()
    plain.close()


asyncio.run(main())
"""


def test_each_use_of_subscriber_in_forked_child_raises_closed(publisher: rt.Publisher) -> None:
    subprocess.run([sys.executable, "-c", FORKED, publisher.directory], check=True, timeout=WAIT_SECONDS)


FORKED_IN_LOOP = """
import asyncio, os, sys
import rt
import rt.aio


async def main():
    child, got = -1, []
    async with rt.aio.Subscriber(sys.argv[1], "s") as subscriber:
        try:
            async for message in subscriber:
                got.append(message.number)
                if len(got) == 4:
                    child = os.fork()
                elif len(got) == 10:
                    break
        except rt.Closed as error:
            if child == 0 and "parent process" in str(error) and len(got) == 4:
                os._exit(7)
            raise
        finally:
            if child == 0:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert got == [*range(10)]


asyncio.run(main())
"""


def test_fork_inside_iteration_raises_closed_in_child(publisher: rt.Publisher) -> None:
    command = [sys.executable, "-c", FORKED_IN_LOOP, publisher.directory]
    subprocess.run(command, check=True, timeout=WAIT_SECONDS)
