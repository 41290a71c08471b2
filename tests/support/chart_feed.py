"""A publisher beside the chart's pods, and a check that all its messages are merged."""

from __future__ import annotations

from pathlib import Path

from chart_pods import Pods

import rt
from rt.log.read.reader import LogReader

VALUES = {
    "stream": "trades",
    "tls": {
        "source": "certManager",
        "clients": [{"name": "feed1", "role": "publisher"}, {"name": "ops", "role": "operator"}],
    },
}


class Feed:
    """A publisher that counts the messages that it sends."""

    def __init__(self, pods: Pods, root: Path) -> None:
        tls = pods.client("trades-rt-client-feed1")
        self.publisher = rt.Publisher(root, "trades", publisher_id="feed1", endpoints=pods.endpoints, tls=tls)
        self.sent = 0

    def send(self) -> None:
        """Send 100 more messages."""
        self.publisher.publish_many([b"%d" % number for number in range(self.sent, self.sent + 100)])
        self.sent += 100
        self.publisher.flush()

    def wait(self) -> None:
        """Wait until all messages are merged."""
        self.publisher.wait(self.sent - 1, level="merged", timeout=240)


def numbers(pods: Pods, pod: str) -> list[int]:
    """Return the numbers that the feed has in a node's merged log."""
    with LogReader(pods.merged(pod)) as reader:
        return [int(message.value) for message in reader if message.session == "feed1"]


def check_nothing_is_lost(pods: Pods, feed: Feed) -> None:
    """Check that every node has every message once and in order, and that all nodes have the same bytes."""
    feed.wait()
    for pod in pods.names:
        pods.wait(lambda pod=pod: len(numbers(pods, pod)) >= feed.sent, f"{pod} to have merged all")  # type: ignore[misc]
        assert numbers(pods, pod) == list(range(feed.sent))
    assert pods.compare().differences == ()
