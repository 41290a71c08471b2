"""Wall clocks of nodes that jump by hours: they affect only timestamps and retention by age."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.wired_nodes import WiredNodes
from faults import WAIT_S, Faults
from operator_calls import told
from preloaded import CLOCK, built, set_clock

import rt
from rt.events import Event, SkipForward
from rt.log.check.status import read_status
from rt.log.disk import REAL
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import merged_directory, read_table

pytestmark = pytest.mark.slow

HOUR = 3600
ROLL_BYTES, LIMIT_BYTES = 32 << 10, 128 << 10
VALUES = [b"x" * 1000] * 50


@pytest.fixture(scope="module")
def nodes() -> Iterator[WiredNodes]:
    """Nodes whose clocks `jump` sets."""
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with WiredNodes(root) as nodes, pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(built(root, "clock", CLOCK)))
            for name in nodes.names:
                set_clock(clock_of(nodes, name), 0)
                patch.setenv("CLOCK_OFFSET_FILE", str(clock_of(nodes, name)))
                nodes.start(name)
            patch.undo()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)


@pytest.fixture
def faults(nodes: WiredNodes, tmp_path: Path) -> Faults:
    return Faults(nodes, tmp_path)


def clock_of(nodes: WiredNodes, name: str) -> Path:
    return nodes.root / f"clock.{name}"


def jump(nodes: WiredNodes, seconds: int, *names: str) -> None:
    """Shift the clocks of these nodes (default: of all nodes) by `seconds`."""
    for name in names or nodes.names:
        set_clock(clock_of(nodes, name), seconds)


def names_clock_of(nodes: WiredNodes, name: str) -> bool:
    """Return whether a node has an alarm about the clock of the node `name`."""
    alarms = told(nodes, "/status")["alarms"]
    return any(one["name"] == "clock-skew" and f"clock of {name} is" in one["text"] for one in alarms)


def configure(nodes: WiredNodes, **changes: int) -> None:
    told(nodes, "/configuration", {"rollBytes": ROLL_BYTES, "retentionDiskPercent": 0, **changes})


def published(nodes: WiredNodes, root: Path, session: str) -> rt.Publisher:
    tls = nodes.certificate("publisher", session)
    return rt.Publisher(root, "s", publisher_id=session, endpoints=nodes.endpoints, tls=tls)


def publish(nodes: WiredNodes, publisher: rt.Publisher, rounds: int) -> int:
    """Publish several segments, round by round; return the position after them, which all nodes have reached.

    No other client publishes. A message counts as merged once its merge is decided, so nodes may still have
    to write it.
    """
    end = max(map(nodes.merged_position, nodes.names)) + rounds * len(VALUES)
    for _ in range(rounds):
        publisher.wait(publisher.publish_many(VALUES)[-1], "merged", timeout=WAIT_S)
    nodes.wait_merged(end)
    return end


def reasons(nodes: WiredNodes, name: str, start: int) -> set[TrimReason]:
    """Return the trim reasons of the segments from a position on that the node has trimmed."""
    table = read_table(REAL, str(nodes.merged_directory(name)))
    trimmed = [one for one in table.segments if one.is_trimmed] if table else []
    return {one.reason for one in trimmed if one.first >= start}


def kept_bytes(nodes: WiredNodes, name: str) -> int:
    """Return the size of the untrimmed segments of a node's merged log."""
    return sum(segment.size_bytes for segment in read_status(nodes.merged_directory(name)).kept)


def starts(nodes: WiredNodes) -> set[int]:
    return {read_status(nodes.merged_directory(name)).start for name in nodes.names}


def test_clock_jumps_of_one_hour_lose_repeat_and_reorder_no_messages(faults: Faults) -> None:
    nodes = faults.nodes
    with faults.sender("jumps") as sender:
        faults.wait_flow(sender)
        for seconds in (HOUR, -HOUR):
            leader = nodes.wait_ready()
            jump(nodes, seconds, leader)
            faults.wait(lambda leader=leader: names_clock_of(nodes, leader), "the wrong clock to be named")
            faults.wait_flow(sender)
            nodes.kill(leader, part="control")
            faults.wait_flow(sender)
            sender.kill()
            sender.start()
            faults.wait_flow(sender)
        jump(nodes, HOUR)
        faults.wait_flow(sender)
        jump(nodes, -HOUR)
        faults.wait_flow(sender)
        jump(nodes, 0)
        faults.wait_flow(sender)
        sender.close()
        faults.verdict()


def test_time_retention_trims_only_when_majority_of_clocks_agrees(nodes: WiredNodes, tmp_path: Path) -> None:
    configure(nodes, retentionMinutes=30)
    with published(nodes, tmp_path, "aged") as publisher:
        publish(nodes, publisher, 3)
        before = starts(nodes)
        leader = nodes.wait_ready()
        jump(nodes, 3 * HOUR, leader)  # Sequencing time never goes back and may be an hour ahead.
        publish(nodes, publisher, 3)
        assert starts(nodes) == before
        nodes.kill(leader, part="control")
        publish(nodes, publisher, 3)
        assert starts(nodes) == before

        other = next(name for name in nodes.names if name != leader)
        jump(nodes, 3 * HOUR, other)
        nodes.wait(lambda: min(starts(nodes)) > max(before), "old segments to go everywhere")
        jump(nodes, 0)
        publish(nodes, publisher, 1)
    assert [reasons(nodes, name, max(before)) for name in nodes.names] == [{TrimReason.TIME}] * 3
    assert nodes.compare().differences == ()
    configure(nodes, retentionMinutes=0)


def test_subscriber_slower_than_retention_gets_event_with_skipped_range_and_reason(
    nodes: WiredNodes, tmp_path: Path
) -> None:
    configure(nodes, retentionMinutes=0, retentionBytes=LIMIT_BYTES)
    tls = nodes.certificate("subscriber", "slow")
    events: list[Event] = []

    def subscriber(position: int) -> rt.Subscriber:
        return rt.Subscriber(
            tmp_path / "copy",
            "s",
            endpoints=nodes.endpoints,
            tls=tls,
            connect_timeout=None,
            position=position,
            on_event=events.append,
        )

    with published(nodes, tmp_path, "fast") as publisher:
        first = publish(nodes, publisher, 1) - len(VALUES)
        with subscriber(first) as slow:
            had = slow.poll(10, timeout=WAIT_S)
            end = slow.position
        assert [message.position for message in had] == list(range(first, end))
        assert events == []

        last = publish(nodes, publisher, 8)
        nodes.wait(
            lambda: all(kept_bytes(nodes, name) <= LIMIT_BYTES for name in nodes.names),
            "all that is to be trimmed to go: what goes later would be skipped by itself",
        )
        assert min(starts(nodes)) > first + len(VALUES)
        with subscriber(end) as slow:
            read = [message.position for message in had]
            while read[-1] < last - 1:
                read += [message.position for message in slow.poll(1000, timeout=WAIT_S)]
    (skip,) = [event for event in events if isinstance(event, SkipForward)]
    assert skip.reason == "size"
    assert end <= skip.wanted < skip.resumed < last
    assert read == [*range(first, skip.wanted), *range(skip.resumed, last)]
    configure(nodes, retentionBytes=0)


def test_idle_stream_is_trimmed_to_its_end_and_continues_at_same_position(
    nodes: WiredNodes, tmp_path: Path
) -> None:
    configure(nodes, retentionMinutes=30, rollMinutes=30)
    tls, copy = nodes.certificate("subscriber", "patient"), tmp_path / "copy"
    with (
        published(nodes, tmp_path, "quiet") as publisher,
        rt.Subscriber(copy, "s", endpoints=nodes.endpoints, tls=tls, connect_timeout=None) as patient,
    ):
        end = publish(nodes, publisher, 1)
        while patient.position < end:
            patient.poll(1000, timeout=WAIT_S)
        jump(nodes, 6 * HOUR)  # Sequencing time may be some hours ahead.
        nodes.wait(lambda: told(nodes, "/log-history?state=active")[0]["logPos"] == end, "an empty segment")
        jump(nodes, 9 * HOUR)
        nodes.wait(lambda: starts(nodes) == {end}, "all that was merged to go")
        directory = Path(merged_directory(copy, "s"))
        nodes.wait(lambda: read_status(directory).start == end, "the subscriber's copy to follow")

        nodes.kill("n2", part="data")
        nodes.wait_ready()
        jump(nodes, 0)
        configure(nodes, retentionMinutes=0, rollMinutes=0)
        last = publish(nodes, publisher, 1)
        read: list[int] = []
        while patient.position < last:
            read += [message.position for message in patient.poll(len(VALUES), timeout=WAIT_S)]
    assert read == [*range(end, last)]
    assert nodes.compare().differences == ()
