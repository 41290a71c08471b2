"""Pods rendered by the chart start, grow to three nodes, restart and renew certificates without loss."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_bench import one
from chart_feed import VALUES, Feed, check_nothing_is_lost
from chart_pods import Pods

from sequencer.localcluster.processes import nothing_left

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grown() -> Iterator[tuple[Pods, Feed]]:
    """Start a stream with one node, and upgrade it to three nodes while messages are published."""
    root = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    with nothing_left():
        pods = Pods(root, {**VALUES, "replicaCount": 1})
        try:
            pods.start()
            pods.wait_ready()
            feed = Feed(pods, root / "feed")
            feed.send()
            feed.wait()
            checksum = pods.checksum
            grow(pods, feed)
            assert pods.checksum == checksum, "members are no part of what restarts nodes"
            feed.publisher.close(timeout=0)
            after = Feed(pods, root / "feed")
            after.sent = feed.sent
            yield pods, after
            after.publisher.close(timeout=0)
        finally:
            pods.close()
            shutil.rmtree(root)


def grow(pods: Pods, feed: Feed) -> None:
    """Do the steps of an upgrade: start the nodes, and run the job that adds them."""
    pods.upgrade({"replicaCount": 3, "scaling": {"raiseFeatureLevel": True}})
    assert pods.jobs("pre-upgrade") == []
    _, *others = pods.names
    pods.start(*others)
    for pod in others:
        pods.wait(lambda pod=pod: pods.answers(pod, "livenessProbe"), f"{pod} to live")  # type: ignore[misc]
        assert not pods.answers(pod, "readinessProbe")
    feed.send()
    (job,) = pods.jobs("match")
    done = pods.run_to_its_end(job)
    assert done.returncode == 0, done.stdout
    pods.wait_ready(meanwhile=feed.send)


def test_stream_grows_from_one_to_three_nodes_without_losing_messages(grown: tuple[Pods, Feed]) -> None:
    pods, feed = grown
    feed.send()

    check_nothing_is_lost(pods, feed)


def test_helm_test_pod_publishes_and_reads_message(grown: tuple[Pods, Feed]) -> None:
    pods, _ = grown

    done = pods.run_to_its_end(one(pods.objects, "Pod"))

    assert done.returncode == 0, done.stdout
    assert "read: hello" in done.stdout


def test_rolling_restart_under_load_with_lost_volume_loses_no_messages(
    grown: tuple[Pods, Feed],
) -> None:
    """During the restart, a host is lost with its volume."""
    pods, feed = grown
    checksum, lost = pods.checksum, pods.names[1]
    pods.upgrade({"config": {"rollBytes": "64Mi", "retention": {"minutes": 600}}})
    assert pods.checksum != checksum

    for pod in reversed(pods.names):  # The controller of StatefulSets uses this order.
        feed.send()
        if pod == lost:
            pods.kill(pod)
            pods.lose_volume(pod)
        else:
            assert pods.stop(pod) == 0
        feed.send()
        pods.start(pod)
        pods.wait_ready(pod, meanwhile=feed.send)

    check_nothing_is_lost(pods, feed)
    assert json.loads(pods.told("/configuration"))["rollBytes"] == 64 * 2**20


def test_renewed_certificates_are_served_without_restart(grown: tuple[Pods, Feed]) -> None:
    pods, feed = grown
    ops = pods.client("trades-rt-client-ops")
    before = {pod: pods.served_certificate(pod, ops) for pod in pods.names}

    pods.renew_certificates()

    for pod in pods.names:
        pods.wait(
            lambda pod=pod: pods.served_certificate(pod, ops) != before[pod],  # type: ignore[misc]
            f"{pod} to show its new certificate",
        )
    feed.send()
    check_nothing_is_lost(pods, feed)
