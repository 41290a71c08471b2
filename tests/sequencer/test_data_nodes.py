"""Real nodes, of which parts die or lag: nothing is lost or stands still, all logs are the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rt
from replicator.push_client import PushClient
from sequencer.testing.nodes import Nodes

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path / "n") as nodes:
        nodes.start()
        nodes.wait_ready()
        yield nodes


@contextlib.contextmanager
def pushing(nodes: Nodes, path: str, endpoints: list[str]) -> Iterator[None]:
    """Push a session directory meanwhile."""
    tls = nodes.certificate("publisher", "feed")
    loop = asyncio.new_event_loop()

    async def push() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await PushClient(path, nodes.stream, endpoints, tls).run()

    task = loop.create_task(push())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        loop.close()


def publish(publisher: rt.Publisher, count: int) -> None:
    """Messages that say their numbers."""
    for _ in range(count // 100):
        start = publisher.next_number
        publisher.publish_many([b"%d" % number for number in range(start, start + 100)])
        publisher.flush()


def assert_all(nodes: Nodes, count: int) -> None:
    nodes.wait_merged(count)
    with rt.LogReader(str(nodes.merged_directory("n1"))) as reader:
        assert [bytes(message.value) for message in reader] == [b"%d" % number for number in range(count)]
    assert not nodes.compare().differences


def test_a_node_that_the_publisher_does_not_reach_keeps_up(nodes, tmp_path):
    publisher = rt.Publisher(str(tmp_path / "p"), "s", publisher_id="feed", roll_bytes=4096)
    with publisher, pushing(nodes, publisher.directory, nodes.endpoints[:2]):
        for round_ in range(1, 4):
            publish(publisher, 5000)
            nodes.wait_merged(5000 * round_)
        assert_all(nodes, 15_000)


def test_all_goes_on_when_every_control_process_is_killed_at_once(nodes, tmp_path):
    publisher = rt.Publisher(str(tmp_path / "p"), "s", publisher_id="feed")
    with publisher, pushing(nodes, publisher.directory, nodes.endpoints):
        publish(publisher, 1000)
        nodes.wait_merged(1000)
        nodes.kill(*nodes.names, part="control")
        publish(publisher, 1000)
        nodes.wait_merged(2000)
        nodes.kill(*nodes.names, part="data")
        publish(publisher, 1000)
        assert_all(nodes, 3000)
