"""Since when a push makes no progress: by hand, and a push client against nodes that take nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from push_node import PushNode

import rt
from replicator.protocol.handshake import NOWHERE, PushStatus
from replicator.protocol.messages import LogOffset
from replicator.push import client as push_client
from replicator.push import stall_detector, stream
from replicator.push.client import PushClient
from replicator.push.stall_detector import STALLED_SECONDS, StallDetector

WAIT_SECONDS = 120


def place(offset: int, run: int = 0) -> LogOffset:
    return LogOffset(run, 0, offset)


@pytest.mark.parametrize(
    ("steps", "stalled_s"),
    [
        ([(0, NOWHERE, 0)], 0),
        ([(0, NOWHERE, 100)], 0),
        ([(0, NOWHERE, 100), (7, NOWHERE, 200)], 7),
        ([(0, NOWHERE, 100), (7, place(64), 200)], 0),
        ([(0, NOWHERE, 100), (7, NOWHERE, 0), (9, NOWHERE, 50), (10, NOWHERE, 60)], 1),
        ([(0, place(500), 10), (3, place(64), 446), (5, place(400), 110)], 5),
        ([(0, place(500), 10), (3, place(0, run=1), 64)], 0),
    ],
    ids=["empty", "first", "nothing moves", "moves", "all done between", "told an earlier place", "next run"],
)
def test_a_push_stalls_for_as_long_as_bytes_wait_and_none_moves(
    steps: list[tuple[float, LogOffset, int]], stalled_s: float
) -> None:
    detector = StallDetector()
    for now_s, reached, waiting in steps:
        status = detector.update(1000 + now_s, reached, waiting)
    assert status == detector.status == PushStatus(steps[-1][2], int(1000 * stalled_s))
    assert not detector.is_stuck
    assert detector.update(1000 + steps[-1][0] + STALLED_SECONDS, steps[-1][1], 1).waiting_bytes == 1
    assert detector.is_stuck == (steps[-1][2] > 0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_push_says_why_it_is_stuck_and_tells_the_nodes_while_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_detector, "STALLED_SECONDS", 0.05)
    monkeypatch.setattr(stream, "STATUS_SECONDS", 0.02)
    monkeypatch.setattr(push_client, "STATUS_SECONDS", 0.02)

    async def test() -> None:
        node = PushNode("n1", members=1)
        node.merges = False
        await node.start()
        with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
            client = PushClient(publisher.directory, "s", [node.endpoint], insecure=True)
            task = asyncio.create_task(client.run())
            await until(lambda: PushStatus() in node.statuses)
            assert client.stuck == ""
            publisher.publish(b"x" * 100)
            publisher.flush()
            await until(lambda: "a majority has synced them, and they are not merged" in client.stuck)
            await node.stop()
            await until(lambda: f"{node.endpoint}: " in client.stuck)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(test())


def test_a_node_is_told_of_bytes_that_it_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STATUS_SECONDS", 0.02)

    async def test() -> None:
        node = PushNode("n1", members=1)
        node.opens_lives = False
        await node.start()
        with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
            publisher.publish(b"x" * 100)
            publisher.flush()
            client = PushClient(publisher.directory, "s", [node.endpoint], insecure=True)
            task = asyncio.create_task(client.run())
            await until(lambda: any(one.waiting_bytes and one.stalled_ms for one in node.statuses))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await node.stop()

    asyncio.run(test())


def test_a_session_that_the_nodes_have_is_not_stuck_though_they_report_nothing_but_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_detector, "STALLED_SECONDS", 0.05)
    monkeypatch.setattr(stream, "STATUS_SECONDS", 0.02)
    monkeypatch.setattr(push_client, "STATUS_SECONDS", 0.02)

    async def test() -> None:
        node = PushNode("n1", members=1)
        await node.start()
        with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
            publisher.publish(b"x" * 100)
            publisher.flush()
            for merges in (True, False):  # The second client hears of no merge.
                node.merges = merges
                node.statuses.clear()
                client = PushClient(publisher.directory, "s", [node.endpoint], insecure=True)
                task = asyncio.create_task(client.run())
                await until(lambda: node.holds(publisher.directory) and len(node.statuses) > 10)
                await until(lambda client=client: client._stall.status == PushStatus())
                assert client.stuck == ""
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await node.stop()

    asyncio.run(test())


def test_an_older_node_is_told_nothing_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STATUS_SECONDS", 0.001)

    async def test() -> None:
        node = PushNode("n1", members=1)
        node.takes_status = False
        await node.start()
        with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
            client = PushClient(publisher.directory, "s", [node.endpoint], insecure=True)
            task = asyncio.create_task(client.run())
            for _ in range(20):
                publisher.publish(b"x" * 100)
                publisher.flush()
                await until(lambda: node.holds(publisher.directory))
            assert node.statuses == []
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await node.stop()

    asyncio.run(test())
