"""A cluster of one node: corruption without a peer to repair it, headers, and idle sessions."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_calls import WAIT_S, is_closed, told, wait_run

import rt
from rt.log.disk import REAL
from rt.log.scan.catalog import read_catalog
from sequencer.localcluster.nodes import LocalCluster

pytestmark = pytest.mark.slow


@pytest.fixture
def node() -> Iterator[LocalCluster]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with LocalCluster(root, 1) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)


def alarms(node: LocalCluster) -> set[str]:
    return {one["name"] for one in told(node, "/status")["alarms"]}


def flip(path: Path) -> None:
    """Flip a bit in place, so that a node that reads the file meanwhile finds all of it."""
    with path.open("r+b") as file:
        (byte,) = os.pread(file.fileno(), 1, 200)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), 200)


def test_corrupt_merged_log_raises_alarm_until_bytes_are_restored_or_hard_reset(
    node: LocalCluster, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"endpoints": node.endpoints, "tls": node.certificate("publisher", "feed")}

    def publish() -> int:
        with rt.Publisher(tmp_path, "s", publisher_id="feed", **options) as publisher:
            publisher.wait(publisher.publish_many([b"x" * 1000] * 50)[-1], "merged", timeout=180)
        return int(told(node, "/latest-out-position")["latestOutPosition"]) + 1

    end = publish()
    node.wait_merged(end)
    directory = node.merged_directory("n1")
    newest = directory / read_catalog(REAL, str(directory)).kept[-1].id.file_name

    def restart_damaged() -> None:
        node.stop("n1")
        flip(newest)
        node.start()
        node.wait(lambda: node.leader() is not None, "a leader")
        node.wait(lambda: "log-corrupt" in alarms(node), "the alarm")

    def is_over() -> bool:
        """Return whether `damage-found` is the only alarm left. It stays for a day."""
        return alarms(node) <= {"damage-found"}

    restart_damaged()
    assert "the merged log is corrupt" in told(node, "/status")["node"]["obstacles"]
    flip(newest)
    node.wait(is_over, "the good bytes to be taken up")
    end = publish()
    node.wait_merged(end)

    restart_damaged()
    told(node, "/hard-reset", {"stream": "s"})
    node.wait(is_over, "the next epoch")
    node.wait_ready()
    assert publish() == end + 50
    node.wait_merged(end + 50)
    with rt.LogReader(directory, position=end, on_event=print) as reader:
        assert [message.position for message in reader] == [*range(end, end + 50)]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_message_headers_pass_from_publisher_to_subscriber(
    node: LocalCluster, tmp_path: Path, compression: Any
) -> None:
    sent = [{"number": b"%d" % number, "same": b"s" * 200} for number in range(300)]
    with rt.Publisher(
        tmp_path / "feed",
        node.stream,
        publisher_id="feed",
        endpoints=node.endpoints,
        tls=node.certificate("publisher", "feed"),
        compression=compression,
    ) as publisher:
        publisher.publish(b"plain")
        last = publisher.publish_many([b"value"] * len(sent), headers=sent)[-1]
        publisher.wait(last, "merged", timeout=60)
    with rt.Subscriber(
        tmp_path / "copy",
        node.stream,
        endpoints=node.endpoints,
        tls=node.certificate("subscriber", "reader"),
        connect_timeout=None,
    ) as subscriber:
        found = []
        while len(found) < len(sent) + 1:
            found += [message.headers for message in subscriber.poll(timeout=60)]
    assert found == [(), *(tuple(headers.items()) for headers in sent)]


def test_idle_session_is_closed_after_publisher_left_and_stays_open_while_connected(
    node: LocalCluster, tmp_path: Path
) -> None:
    """A leader counts the idle minute from its election. The leader of a single-node cluster does not change,
    even if the machine stalls.
    """
    options: dict[str, Any] = {"endpoints": node.endpoints, "tls": node.certificate("publisher", "quiet")}

    def publish_and_go() -> None:
        with rt.Publisher(tmp_path, "s", publisher_id="quiet~gone", **options) as publisher:
            publisher.wait(publisher.publish(b"x"), "merged", timeout=WAIT_S)

    told(node, "/configuration", {"sessionIdleMinutes": 1})
    publish_and_go()
    with rt.Publisher(tmp_path, "s", publisher_id="quiet~here", **options) as here:
        here.wait(here.publish(b"x"), "merged", timeout=WAIT_S)
        # Poll rarely, because each request costs a handshake.
        node.wait(
            lambda: is_closed(node, "quiet~gone"),
            "the session to be closed",
            timeout_s=2 * WAIT_S,
            poll_s=0.5,
        )
        assert not is_closed(node, "quiet~here")
        here.wait(here.publish(b"x"), "merged", timeout=WAIT_S)
    publish_and_go()
    wait_run(node, "quiet~gone", 1)
