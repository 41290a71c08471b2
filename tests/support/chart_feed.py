"""A publisher beside the chart's pods, and whether all that it sent is merged."""

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
    """A publisher that never stops: what it sends is counted."""

    def __init__(self, pods: Pods, root: Path) -> None:
        tls = pods.client("trades-rt-client-feed1")
        self.publisher = rt.Publisher(root, "trades", publisher_id="feed1", endpoints=pods.endpoints, tls=tls)
        self.sent = 0

    def send(self) -> None:
        """Some more."""
        self.publisher.publish_many([b"%d" % number for number in range(self.sent, self.sent + 100)])
        self.sent += 100
        self.publisher.flush()

    def wait(self) -> None:
        """Until all of it is merged."""
        self.publisher.wait(self.sent - 1, level="merged", timeout=240)


def numbers(pods: Pods, pod: str) -> list[int]:
    """What a node's merged log holds of the feed."""
    with LogReader(pods.merged(pod)) as reader:
        return [int(message.value) for message in reader if message.session == "feed1"]


def check_nothing_is_lost(pods: Pods, feed: Feed) -> None:
    """Every node has every message once, in order, and all of them have the same bytes."""
    feed.wait()
    for pod in pods.names:
        pods.wait(lambda pod=pod: len(numbers(pods, pod)) >= feed.sent, f"{pod} to have merged all")  # type: ignore[misc]
        assert numbers(pods, pod) == list(range(feed.sent))
    assert pods.compare().differences == ()
