"""Detection of a push without progress: the detector alone, and in a push client with a node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from push_node import PushNode

import rt
from replicator.protocol.handshake import NOWHERE, PushStatus
from replicator.protocol.messages import LogOffset
from replicator.push import client as push_client
from replicator.push import session_source, stall_detector
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
def test_push_stalls_for_as_long_as_bytes_wait_and_none_moves(
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


@contextlib.asynccontextmanager
async def pushed(publisher: rt.Publisher, node: PushNode) -> AsyncIterator[PushClient]:
    """A client that pushes the session to the node until the block ends."""
    client = PushClient(publisher.directory, "s", [node.endpoint], insecure=True)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run_with_node(test: Callable[[PushNode, rt.Publisher], Coroutine[Any, Any, None]], root: Path) -> None:
    """Run a test with a node that forms the whole cluster, and with a publisher. The test pushes the
    publisher's session.
    """

    async def run() -> None:
        node = await PushNode("n1", members=1).start()
        try:
            with rt.Publisher(root, "s", publisher_id="feed", linger_ms=0) as publisher:
                await test(node, publisher)
        finally:
            await node.stop()

    asyncio.run(run())


def publish(publisher: rt.Publisher) -> None:
    publisher.publish(b"x" * 100)
    publisher.flush()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a push count as stuck, and report it, after a moment."""
    monkeypatch.setattr(stall_detector, "STALLED_SECONDS", 0.05)
    monkeypatch.setattr(session_source, "STATUS_SECONDS", 0.02)
    monkeypatch.setattr(push_client, "STATUS_SECONDS", 0.02)


@pytest.mark.usefixtures("soon")
def test_stuck_push_names_reason_and_reports_it_to_nodes(tmp_path: Path) -> None:
    async def test(node: PushNode, publisher: rt.Publisher) -> None:
        node.merges = False
        async with pushed(publisher, node) as client:
            await until(lambda: PushStatus() in node.statuses)
            assert client.stuck == ""
            hellos = 0

            def is_stuck() -> bool:
                """Publish again after a reconnect, because a client then counts only bytes that the node does
                not have.
                """
                nonlocal hellos
                if len(node.hellos) > hellos:
                    hellos = len(node.hellos)
                    publish(publisher)
                return "a majority has synced them, and they are not merged" in client.stuck

            await until(is_stuck)
            await node.stop()
            await until(lambda: f"{node.endpoint}: " in client.stuck)

    run_with_node(test, tmp_path)


@pytest.mark.usefixtures("soon")
def test_bytes_not_accepted_by_node_are_reported_to_it_as_stalled(tmp_path: Path) -> None:
    async def test(node: PushNode, publisher: rt.Publisher) -> None:
        node.opens_lives = False
        publish(publisher)
        async with pushed(publisher, node):
            await until(lambda: any(one.waiting_bytes and one.stalled_ms for one in node.statuses))

    run_with_node(test, tmp_path)


@pytest.mark.usefixtures("soon")
def test_fully_replicated_session_is_not_stuck_without_merge_reports(
    tmp_path: Path,
) -> None:
    async def test(node: PushNode, publisher: rt.Publisher) -> None:
        publish(publisher)
        for merges in (True, False):  # The second client receives no merge reports.
            node.merges = merges
            node.statuses.clear()
            async with pushed(publisher, node) as client:
                await until(lambda: node.holds(publisher.directory) and len(node.statuses) > 10)
                await until(lambda client=client: client._stall.status == PushStatus())
                assert client.stuck == ""

    run_with_node(test, tmp_path)


def test_node_without_status_support_receives_no_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_source, "STATUS_SECONDS", 0.001)

    async def test(node: PushNode, publisher: rt.Publisher) -> None:
        node.takes_status = False
        async with pushed(publisher, node):
            for _ in range(20):
                publish(publisher)
                await until(lambda: node.holds(publisher.directory))
            assert node.statuses == []

    run_with_node(test, tmp_path)
