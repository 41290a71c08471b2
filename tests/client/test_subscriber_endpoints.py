"""Subscribers with endpoints: a pull process fills the copy, and its permanent errors are raised."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pull_source import PullSource, pull_source
from receiving_node import make_pki, tls_of

import rt
from rt.child_process import ChildProcess
from rt.errors import Diverged, InvalidOption
from rt.events import CorruptPositions, HoldRefused, SkipForward
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.read.start_position import StartTime, check_place
from rt.log.scan.directory import read_durable_end
from rt.net import cert_validity
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.sidecar.pull_process import LOCK_FILE

WAIT_SECONDS = 120
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def source(tmp_path: Path, pki: Path) -> Iterator[PullSource]:
    with pull_source(tmp_path / "node", pki) as source:
        yield source


def subscriber_of(root: Path, pki: Path, source: PullSource, **options: Any) -> rt.Subscriber:
    settings = {"endpoints": [source.endpoint], "tls": tls_of(pki, "sub"), "connect_timeout": None}
    return rt.Subscriber(root, "s", **(settings | options))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def take(subscriber: rt.Subscriber, count: int) -> list[bytes]:
    """The next `count` values."""
    values: list[bytes] = []
    while len(values) < count:
        messages = subscriber.poll(count - len(values), WAIT_SECONDS)
        assert messages, values
        values += [message.value for message in messages]
    return values


def client_of(subscriber: rt.Subscriber) -> ChildProcess:
    assert subscriber._copy is not None
    until(lambda: subscriber._copy._pulling._process)  # type: ignore[union-attr]
    process = subscriber._copy._pulling._process
    assert process is not None
    return process


def test_subscriber_receives_messages_from_node_and_close_ends_pull_process(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"one", b"two")
    with subscriber_of(tmp_path, pki, source) as subscriber:
        assert subscriber.directory == str(tmp_path / "s" / "merged")
        assert take(subscriber, 2) == [b"one", b"two"]
        source.publish(b"three")
        source.roll()
        source.publish(b"four")
        assert take(subscriber, 2) == [b"three", b"four"]
        assert subscriber.position == 4
        client = client_of(subscriber)
    assert client.status is not None
    with rt.LogReader(subscriber.directory) as reader:
        assert len(list(reader)) == 4


def test_subscriber_opens_before_log_exists(tmp_path: Path, pki: Path, source: PullSource) -> None:
    with subscriber_of(tmp_path, pki, source) as subscriber:
        assert subscriber.poll(timeout=0) == []
        assert subscriber.position == 0
        source.publish(b"one")
        assert take(subscriber, 1) == [b"one"]


def test_copy_lock_failure_raises_storage_failed_and_logs_no_traceback(
    tmp_path: Path, pki: Path, source: PullSource, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock fails as on a read-only file system, or as for a copy of another user."""
    source.publish(b"one")
    with subscriber_of(tmp_path, pki, source) as subscriber:
        assert take(subscriber, 1) == [b"one"]
    lock = Path(subscriber.directory, LOCK_FILE)
    lock.unlink()
    lock.symlink_to(lock)
    with subscriber_of(tmp_path, pki, source) as subscriber:
        assert take(subscriber, 1) == [b"one"]
        with pytest.raises(rt.StorageFailed, match="locking a copy"):
            subscriber.poll(timeout=WAIT_SECONDS)
    (failed,) = [record for record in caplog.records if record.message.startswith("pull_failed")]
    assert failed.exc_info is None
    assert f"(at {lock})" in failed.message


def test_pull_stops_at_certificate_expiry_and_continues_with_renewed_certificate(
    tmp_path: Path, pki: Path, source: PullSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "pki"
    shutil.copytree(pki, own)
    issue(own, Identity("s", "subscriber", "sub"), days=1, renew=True)
    clock_s = time.time()
    monkeypatch.setattr(cert_validity, "LOOK_S", 0.01)
    monkeypatch.setattr(cert_validity, "clock_s", lambda: clock_s)
    source.publish(b"one")
    with subscriber_of(tmp_path, own, source) as subscriber:
        assert take(subscriber, 1) == [b"one"]
        client = client_of(subscriber)
        clock_s += 2 * 24 * 3600
        until(lambda: not source.node.pull.pulls)
        source.publish(b"two")
        issue(own, Identity("s", "subscriber", "sub"), renew=True)
        assert take(subscriber, 1) == [b"two"]
        assert client_of(subscriber) is client


def test_killed_pull_process_is_restarted(tmp_path: Path, pki: Path, source: PullSource) -> None:
    with subscriber_of(tmp_path, pki, source) as subscriber:
        for number in range(3):
            source.publish(b"%d" % number)
            assert take(subscriber, 1) == [b"%d" % number]
            os.kill(client_of(subscriber).pid, signal.SIGKILL)
            source.publish(b"meanwhile")
            assert take(subscriber, 1) == [b"meanwhile"]


def test_subscriber_waits_for_stopped_node(tmp_path: Path, pki: Path, source: PullSource) -> None:
    source.stop()
    source.publish(b"one")
    with subscriber_of(tmp_path, pki, source) as subscriber:
        client_of(subscriber)
        source.start()
        assert take(subscriber, 1) == [b"one"]
        source.stop()
        source.publish(b"two")
        source.start()
        assert take(subscriber, 1) == [b"two"]


def test_two_subscribers_share_pull_process_and_remaining_one_takes_over(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    first = subscriber_of(tmp_path, pki, source)
    client = client_of(first)
    with subscriber_of(tmp_path, pki, source) as second:
        source.publish(b"one")
        assert take(first, 1) == take(second, 1) == [b"one"]
        assert second._copy is not None
        until(lambda: second._copy._pulling.is_shared)  # type: ignore[union-attr]
        assert second._copy._pulling._process is None
        first.close()
        source.publish(b"two")
        assert take(second, 1) == [b"two"]
        assert client_of(second).pid != client.pid


@pytest.mark.parametrize("role", ["publisher", "stranger"])
def test_certificate_of_wrong_role_or_stream_raises_error(
    tmp_path: Path, pki: Path, source: PullSource, role: str
) -> None:
    source.publish(b"one")
    tls = tls_of(pki, {"publisher": "feed"}.get(role, role))
    with subscriber_of(tmp_path, pki, source, tls=tls) as subscriber:
        for _ in range(2):
            with pytest.raises((rt.CertificateError, rt.ClusterMismatch), match=r"role|stream"):
                subscriber.poll(timeout=WAIT_SECONDS)
        with pytest.raises(rt.RtError):
            next(iter(subscriber))


def test_copy_of_another_log_raises_diverged_after_its_messages(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"one")
    with pull_source(tmp_path / "other", pki) as other, subscriber_of(tmp_path, pki, other) as subscriber:
        other.publish(b"different")
        other.publish(b"further")
        assert take(subscriber, 2) == [b"different", b"further"]
    source.publish(b"two", bytes(1000))
    with subscriber_of(tmp_path, pki, source) as subscriber:
        assert take(subscriber, 2) == [b"different", b"further"]
        with pytest.raises(rt.Diverged, match="rt log compare"):
            subscriber.poll(timeout=WAIT_SECONDS)


def test_topics_are_filtered_by_node_into_separate_copy(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"a1", topic="a")
    source.publish(b"b1", topic="b")
    with (
        subscriber_of(tmp_path, pki, source, topics=["b"]) as some,
        subscriber_of(tmp_path, pki, source) as every,
    ):
        assert take(every, 2) == [b"a1", b"b1"]
        assert take(some, 1) == [b"b1"]
        assert some.position == 2
        source.publish(b"x" * 100_000, topic="a")
        source.publish(b"b2", topic="b")
        assert take(some, 1) == [b"b2"]
        assert take(every, 2)[1] == b"b2"
        sizes = [
            sum(path.stat().st_size for path in Path(subscriber.directory).glob("log.*"))
            for subscriber in (some, every)
        ]
        assert sizes[0] < 10_000 < sizes[1]


def test_topic_patterns_are_filtered_by_node_and_invalid_topics_rejected(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    for topic in ("trades/a", "quotes/a", "trades/b"):
        source.publish(topic.encode(), topic=topic)
    patterns = ["trades/*", "quotes/[b-z]"]
    with subscriber_of(tmp_path, pki, source, topics=patterns) as subscriber:
        assert take(subscriber, 2) == [b"trades/a", b"trades/b"]
        with rt.LogReader(subscriber.directory) as everything:
            assert [message.topic for message in everything] == ["trades/a", "trades/b"]
    with pytest.raises(InvalidOption, match="a set that matches nothing"):
        subscriber_of(tmp_path, pki, source, topics=["trades/["])
    with pytest.raises(InvalidOption, match="too many topics"):
        subscriber_of(tmp_path, pki, source, topics=[str(number) for number in range(2000)])


def test_filtered_copy_has_messages_before_its_start_position(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    for number in range(6):
        source.publish(b"%d" % number, topic="ab"[number % 2])
    with subscriber_of(tmp_path, pki, source, topics=["a"], position=4) as subscriber:
        assert take(subscriber, 1) == [b"4"]
    with subscriber_of(tmp_path, pki, source, topics=["a"], position=1) as subscriber:
        assert take(subscriber, 2) == [b"2", b"4"]


def test_named_subscriber_of_idle_topic_advances_past_other_topics(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    """Otherwise the subscriber would prevent trims, and its lag would grow, while its topic has no
    message.
    """
    source.publish(b"a1", topic="a")
    with subscriber_of(tmp_path, pki, source, topics=["a"], name="sub") as subscriber:
        assert take(subscriber, 1) == [b"a1"]
        source.publish(*[b"b"] * 100, topic="b")

        def has_passed() -> bool:
            assert subscriber.poll(timeout=0.05) == []
            return subscriber.position == subscriber.passed == 101

        until(has_passed)
        assert subscriber.stats().lag == 0
        subscriber.ack(subscriber.position)
        until(lambda: ("sub", 101) in source.acknowledged)
        source.publish(b"a2", topic="a")
        assert take(subscriber, 1) == [b"a2"]


@pytest.mark.parametrize("topics", [None, ["t"]])
def test_stored_position_of_old_epoch_raises_diverged_on_new_copy_after_forced_reset(
    tmp_path: Path, pki: Path, source: PullSource, topics: list[str] | None
) -> None:
    """The program stored position 6 of epoch 0. Its copy was moved away, as the text of `rt.Diverged`
    advises.
    """
    source.publish(b"0", b"1", b"2", topic="t")
    source.roll(forced := 65_536)
    for number in range(3, 9):
        source.publish(b"%d" % number, topic="t")
        if number == 5:
            source.roll()
    with subscriber_of(tmp_path, pki, source, position=6, epoch=0, topics=topics) as subscriber:
        for _ in range(2):
            # The new copy starts after the position of the reset.
            with pytest.raises(Diverged, match=r"X from 65536 on\. Start again at its logPos"):
                subscriber.poll(100, WAIT_SECONDS)
        assert (subscriber.position, subscriber.epoch) == (6, 0)
    with subscriber_of(tmp_path, pki, source, position=6, epoch=forced, topics=topics) as subscriber:
        assert take(subscriber, 3) == [b"6", b"7", b"8"]


def test_subscriber_of_idle_topic_advances_position_and_epoch_over_forced_reset(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"0", b"1", b"2", topic="t")
    with subscriber_of(tmp_path, pki, source, topics=["t"]) as subscriber:
        assert take(subscriber, 3) == [b"0", b"1", b"2"]
        stored: dict[str, Any] = {"position": subscriber.position, "epoch": subscriber.epoch}
    source.roll(forced := 65_536)
    source.publish(b"3", b"4", topic="other")
    with subscriber_of(tmp_path, pki, source, topics=["t"], **stored) as subscriber:
        while subscriber.position < 5:
            assert subscriber.poll(1, timeout=0.1) == []
        stored = {"position": subscriber.position, "epoch": subscriber.epoch}
    assert stored == {"position": 5, "epoch": forced}
    source.publish(b"5", topic="t")
    with subscriber_of(tmp_path, pki, source, topics=["t"], **stored) as subscriber:
        assert take(subscriber, 1) == [b"5"]


def test_start_position_after_log_end_waits_for_its_message(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"0", b"1", b"2")
    with subscriber_of(tmp_path, pki, source, position=4) as subscriber:
        assert subscriber.poll(timeout=0.1) == []
        source.publish(b"3", b"4", b"5")
        assert take(subscriber, 2) == [b"4", b"5"]


def test_start_at_latest_is_log_end_when_node_is_reached(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"0", b"1", b"2")
    for expected in (3, 4):
        with subscriber_of(tmp_path, pki, source, position="latest") as subscriber:
            until(lambda: subscriber._copy._pulling.log_end is not None)  # type: ignore[union-attr]
            source.publish(b"next")
            assert take(subscriber, 1) == [b"next"]
            assert subscriber.position == expected + 1


def at_seconds(*seconds: float) -> list[int]:
    return [int(NOON.timestamp() + second) * 10**9 for second in seconds]


def hours(source: PullSource) -> None:
    """Publish the messages b"0" to b"5" in three segments of two. Their times are NOON and the five seconds
    after it.
    """
    for first in (0, 2, 4):
        source.publish(*(b"%d" % at for at in (first, first + 1)), timestamps_ns=at_seconds(first, first + 1))
        source.roll()


def test_start_by_time_starts_copy_with_segment_of_that_time(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    hours(source)
    with subscriber_of(tmp_path, pki, source, name="sub", position=NOON + 3 * SECOND) as subscriber:
        assert take(subscriber, 3) == [b"3", b"4", b"5"]
        assert not (Path(subscriber.directory) / "log.0.0").exists()
        until(lambda: source.acknowledged[-1:] == [("sub", 3)])
        assert {position for _, position in source.acknowledged} == {3}
        subscriber.seek(NOON + 5 * SECOND)
        assert take(subscriber, 1) == [b"5"]
        subscriber.seek(NOON)  # This time is before the start of the copy.
        assert take(subscriber, 1) == [b"2"]
        subscriber.seek("latest")
        source.publish(b"late", timestamps_ns=at_seconds(-1))
        assert take(subscriber, 1) == [b"late"]
    source.stop()
    with subscriber_of(tmp_path, pki, source, position=NOON + 4 * SECOND) as offline:
        assert take(offline, 3) == [b"4", b"5", b"late"]


def test_start_by_time_before_copy_asks_nodes_and_reports_gap(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    hours(source)
    with subscriber_of(tmp_path, pki, source, position=4) as subscriber:
        assert take(subscriber, 2) == [b"4", b"5"]
    events: list[Any] = []
    options = {"position": NOON + SECOND, "on_event": events.append}
    with subscriber_of(tmp_path, pki, source, **options) as subscriber:
        assert take(subscriber, 2) == [b"4", b"5"]
    assert [(event.wanted, event.resumed) for event in events if isinstance(event, SkipForward)] == [(1, 4)]


@pytest.mark.parametrize("topics", [None, ["t"]])
def test_start_by_time_after_log_end_waits_for_first_message_of_that_time(
    tmp_path: Path, pki: Path, source: PullSource, topics: list[str] | None
) -> None:
    hours(source)
    options = {"position": NOON + 60 * SECOND, "topics": topics, "name": "sub"}
    with subscriber_of(tmp_path, pki, source, **options) as subscriber:
        until(lambda: subscriber.log_end is not None)
        source.publish(b"early", topic="t", timestamps_ns=at_seconds(59))
        source.publish(b"first", b"older", topic="t", timestamps_ns=at_seconds(60, 7))
        assert take(subscriber, 2) == [b"first", b"older"]
        until(lambda: source.acknowledged)
        assert source.acknowledged[0] == ("sub", 6)


def test_start_by_time_in_filtered_copy_counts_messages_of_all_topics(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"0", topic="t", timestamps_ns=at_seconds(0))
    source.publish(b"1", topic="other", timestamps_ns=at_seconds(5))
    source.publish(b"2", b"3", topic="t", timestamps_ns=at_seconds(2, 6))
    with subscriber_of(tmp_path, pki, source, topics=["t"], position=NOON + 4 * SECOND) as subscriber:
        assert take(subscriber, 2) == [b"2", b"3"]


def test_start_by_time_in_filtered_copy_returns_none_before_nodes_answer(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"0", topic="t", timestamps_ns=at_seconds(0))
    source.publish(b"1", topic="other", timestamps_ns=at_seconds(5))
    source.publish(b"2", b"3", topic="t", timestamps_ns=at_seconds(2, 6))
    wanted = check_place(NOON + 4 * SECOND)
    with subscriber_of(tmp_path, pki, source, topics=["t"]) as subscriber:
        assert take(subscriber, 3) == [b"0", b"2", b"3"]
        copy = subscriber._copy
        assert copy is not None
        assert copy.start(wanted, is_seek=False) is None
        found = copy.start(wanted, is_seek=True)
        assert isinstance(found, StartTime)
        assert found.position == 3


def test_start_by_time_opens_before_log_exists(tmp_path: Path, pki: Path, source: PullSource) -> None:
    with subscriber_of(tmp_path, pki, source, position=NOON + SECOND) as subscriber:
        assert subscriber.poll(timeout=0) == []
        source.publish(b"0", b"1", timestamps_ns=at_seconds(0, 1))
        assert take(subscriber, 1) == [b"1"]


def test_start_by_time_searches_copy_filled_by_another_subscriber(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    hours(source)
    with subscriber_of(tmp_path, pki, source) as first:
        assert take(first, 1) == [b"0"]
        with subscriber_of(tmp_path, pki, source, position=NOON + 4 * SECOND) as second:
            assert take(second, 2) == [b"4", b"5"]


def test_deleted_copy_is_pulled_again_and_trimmed_messages_are_reported(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"0", b"1", b"2")
    with subscriber_of(tmp_path, pki, source, name="sub") as subscriber:
        assert take(subscriber, 2) == [b"0", b"1"]
        subscriber.ack(2)
    with subscriber_of(tmp_path, pki, source, name="sub") as subscriber:
        assert take(subscriber, 1) == [b"2"]
    source.roll()
    source.publish(b"3", b"4")
    shutil.rmtree(subscriber.directory)
    with subscriber_of(tmp_path, pki, source, name="sub") as subscriber:
        assert take(subscriber, 5) == [b"0", b"1", b"2", b"3", b"4"]
    shutil.rmtree(subscriber.directory)
    source.trim(SegmentId(0, 1))
    events: list[Any] = []
    with subscriber_of(tmp_path, pki, source, position=2, on_event=events.append) as subscriber:
        assert take(subscriber, 2) == [b"3", b"4"]
    assert [(event.wanted, event.resumed) for event in events if isinstance(event, SkipForward)] == [(2, 3)]


def test_nodes_receive_start_and_acknowledged_positions_of_named_subscriber(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    for value in (b"0", b"1", b"2"):
        source.publish(value)
        source.roll()
    source.trim(SegmentId(0, 1))
    with subscriber_of(tmp_path, pki, source) as anonymous:
        take(anonymous, 2)
        with subscriber_of(tmp_path, pki, source, name="sub") as named:
            assert take(named, 1) == [b"1"]
            until(lambda: source.acknowledged[-1:] == [("sub", 1)])
            named.ack(2)
            until(lambda: source.acknowledged[-1] == ("sub", 2))
    heard = len(source.acknowledged)
    with subscriber_of(tmp_path, pki, source, name="sub", position="latest") as named:
        until(lambda: named.log_end is not None)
        source.publish(b"3")
        assert take(named, 1) == [b"3"]
        until(lambda: len(source.acknowledged) > heard)
        assert source.acknowledged[-1] == ("sub", 2)


def test_seek_of_named_subscriber_does_not_move_start_of_its_hold(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    for number in range(6):
        source.publish(b"%d" % number)
    with subscriber_of(tmp_path, pki, source, name="sub", position=1) as named:
        assert take(named, 1) == [b"1"]
        named.seek(5)
        assert take(named, 1) == [b"5"]
        assert named._cursor is not None
        assert named._cursor._begun == 1
        named.seek(0)
        assert take(named, 1) == [b"0"]
        assert named._cursor._begun == 1


def test_connect_timeout_raises_timeout_once_and_subscriber_continues(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"one")
    source.stop()
    with subscriber_of(tmp_path, pki, source, connect_timeout=0) as subscriber:
        with pytest.raises(rt.Timeout, match="no node was reached") as raised:
            subscriber.poll(timeout=WAIT_SECONDS)
        assert f"{source.endpoint}: connection refused" in str(raised.value)
        assert subscriber.poll(timeout=0.01) == []
        source.start()
        assert take(subscriber, 1) == [b"one"]


def test_connect_timeout_raises_timeout_with_existing_copy(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.publish(b"one")
    with subscriber_of(tmp_path, pki, source) as subscriber:
        assert take(subscriber, 1) == [b"one"]
    source.stop()
    with subscriber_of(tmp_path, pki, source, position=1, connect_timeout=0) as subscriber:
        with pytest.raises(rt.Timeout, match="no node was reached"):
            subscriber.poll(timeout=WAIT_SECONDS)
        assert subscriber.poll(timeout=0.01) == []


def test_refused_hold_is_reported_as_event_while_subscriber_polls_without_waiting(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    source.stop()
    source.refuses_holds = "there are too many"
    source.start()
    for _ in range(3):
        source.publish(*[b"x"] * 100)
    events: list[Any] = []
    with subscriber_of(tmp_path, pki, source, name="sub", on_event=events.append) as subscriber:
        take(subscriber, 1)

        def is_told() -> bool:
            if not subscriber.poll(1, timeout=0):
                source.publish(*[b"x"] * 100)
            return bool(events)

        until(is_told)
    assert events[0] == HoldRefused("sub", "there are too many")


@pytest.mark.parametrize("retention", ["follow", "own"])
@pytest.mark.parametrize("topics", [None, ["b"]])
def test_messages_trimmed_while_subscriber_is_closed_are_reported(
    tmp_path: Path, pki: Path, source: PullSource, topics: list[str] | None, retention: str
) -> None:
    source.publish(b"0", topic="b")
    source.publish(b"1", topic="a")
    events: list[Any] = []
    options = {"name": "sub", "topics": topics, "on_event": events.append, "retention": retention}
    with subscriber_of(tmp_path, pki, source, **options) as subscriber:
        assert take(subscriber, 1) == [b"0"]
        subscriber.ack(1)
        until(lambda: durable_end(subscriber) == 2)
    for number in (2, 3, 4):
        source.roll()
        source.publish(b"%d" % number, topic="b")
    source.trim(SegmentId(0, 2))
    with subscriber_of(tmp_path, pki, source, **options) as subscriber:
        assert take(subscriber, 2 if topics else 3)[-2:] == [b"3", b"4"]
    skips = [event for event in events if isinstance(event, SkipForward)]
    assert {event.reason for event in skips} == {"time"}
    gone = [(event.wanted, event.resumed) for event in skips]
    # If a segment was trimmed before it was read, the messages that match the filter are unknown.
    assert gone in ([(2, 3)], [(1, 2), (2, 3)], [(1, 3)])


def durable_end(subscriber: rt.Subscriber) -> int:
    durable = read_durable_end(REAL, subscriber.directory)
    return 0 if durable is None else durable.end


def test_trim_by_nodes_applies_to_copy_with_follow_retention_but_not_with_own(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    for _ in range(3):
        source.publish(b"x", b"y")
        source.roll()
    source.publish(b"x", b"y")
    with (
        subscriber_of(tmp_path / "follow", pki, source) as following,
        subscriber_of(tmp_path / "own", pki, source, retention="own") as own,
    ):
        take(following, 8)
        take(own, 8)
        source.trim(SegmentId(0, 1))
        until(lambda: kept(following) == 3)
        assert kept(own) == 4
        with pytest.raises(ValueError, match="retention='own'"):
            following.trim(2)
        with pytest.raises(ValueError, match="not delivered"):
            own.trim(9)
        own.trim(5)
        source.publish(b"z")
        until(lambda: kept(own) == 2)


def kept(subscriber: rt.Subscriber) -> int:
    found = 0
    for path in Path(subscriber.directory).glob("log.*"):
        with contextlib.suppress(FileNotFoundError):  # The file may be trimmed meanwhile.
            found += path.stat().st_size > 0
    return found


PROGRAM = """
import sys
import rt
root, endpoint, *files = sys.argv[1:]
with rt.Subscriber(root, "s", endpoints=[endpoint], tls=rt.TLS(*files), name="sub") as subscriber:
    for message in subscriber:
        subscriber.ack(message.position + 1)
        print(message.value.decode(), subscriber._copy._pulling._process.pid, flush=True)
"""


def test_killed_subscriber_ends_its_pull_process_and_resumes_at_acknowledged_position(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    tls = tls_of(pki, "sub")
    files = [os.fspath(path) for path in (tls.ca, tls.cert, tls.key)]
    for number in range(3):
        source.publish(b"%d" % number)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path, source.endpoint, *files], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        value, pid = process.stdout.readline().split()
        assert value == b"%d" % number
        client = os.pidfd_open(int(pid))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        poll = select.poll()
        poll.register(client, select.POLLIN)
        assert poll.poll(WAIT_SECONDS * 1000)
        os.close(client)


def fill_two_segments(tmp_path: Path, pki: Path, source: PullSource, **options: Any) -> str:
    """Fill a copy with 60 messages in two synced segments; return its directory."""
    source.publish(*(b"%d" % number + bytes(500) for number in range(30)))
    source.roll()
    source.publish(*(b"%d" % number + bytes(500) for number in range(30, 60)))
    with subscriber_of(tmp_path, pki, source, **options) as subscriber:
        take(subscriber, 60)
        path = subscriber.directory
        size = os.path.getsize(f"{path}/log.0.1")
        until(lambda: (durable := read_durable_end(REAL, path)) is not None and durable.offset == size)
    return path


def flip(path: str, at: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[at] ^= 4
    Path(path).write_bytes(bytes(data))


@pytest.mark.parametrize(("name", "at"), [("log.0.0", 4000), ("log.0.1", 4000), ("log.0.0", 8)])
def test_corrupt_copy_is_repaired_from_node_and_delivers_every_message(
    tmp_path: Path, pki: Path, source: PullSource, name: str, at: int
) -> None:
    path = fill_two_segments(tmp_path, pki, source)
    flip(f"{path}/{name}", at)
    with subscriber_of(tmp_path, pki, source, position=0) as subscriber:
        values = take(subscriber, 60)
    assert [int(value[:2].rstrip(b"\0")) for value in values] == list(range(60))
    assert Path(path, name).read_bytes() == Path(source.merged, name).read_bytes()


def test_corrupt_copy_found_by_reader_during_pull_is_repaired(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    path = fill_two_segments(tmp_path, pki, source)
    with subscriber_of(tmp_path, pki, source, position=0) as subscriber:
        take(subscriber, 1)
        flip(f"{path}/log.0.1", 9000)
        assert len(take(subscriber, 59)) == 59
        source.publish(b"more")
        assert take(subscriber, 1) == [b"more"]


def test_corrupt_copy_without_repair_source_raises_corrupt_with_path_range_and_advice(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    path = fill_two_segments(tmp_path, pki, source, retention="own")
    flip(f"{path}/log.0.0", 4000)
    source.trim(SegmentId(0, 1))
    settings = {"position": 0, "retention": "own"}
    with (
        subscriber_of(tmp_path, pki, source, **settings) as subscriber,
        pytest.raises(rt.Corrupt) as caught,
    ):
        take(subscriber, 60)
    assert caught.value.path == f"{path}/log.0.0"
    assert "positions 0 to 29" in str(caught.value)
    assert f"Remove the directory {path}" in str(caught.value)


@pytest.mark.parametrize("has_handler", [True, False])
def test_positions_corrupt_on_all_nodes_are_reported_once_and_delivered_after_repair(
    tmp_path: Path, pki: Path, source: PullSource, *, has_handler: bool
) -> None:
    for number in range(20):
        source.publish(b"%d" % number + bytes(500))
    source.roll()
    source.publish(b"last")
    good = Path(source.merged, "log.0.0").read_bytes()
    flip(f"{source.merged}/log.0.0", len(good) // 2)
    events: list[rt.events.Event] = []
    with subscriber_of(tmp_path, pki, source, on_event=events.append if has_handler else None) as subscriber:
        values: list[bytes] = []

        def is_told() -> bool:
            try:
                values.extend(message.value for message in subscriber.poll(timeout=0.05))
            except rt.Gap as gap:
                events.append(gap.event)
            return bool(events)

        until(is_told)
        (corrupt,) = events
        assert isinstance(corrupt, CorruptPositions)
        assert 0 < corrupt.start == len(values) < 20
        assert corrupt.end is None  # This node does not know the end.
        assert subscriber.poll(timeout=0.2) == []
        whole = tmp_path / "whole"  # A half-written file could be reported as another corruption.
        whole.write_bytes(good)
        whole.rename(f"{source.merged}/log.0.0")
        assert len(take(subscriber, 21 - len(values))) == 21 - len(values)
    assert len(events) == 1


def test_close_ends_wait_for_missing_log(tmp_path: Path, pki: Path, source: PullSource) -> None:
    source.stop()
    subscriber = subscriber_of(tmp_path, pki, source)
    follower = threading.Thread(target=lambda: list(subscriber))
    follower.start()
    until(lambda: subscriber._is_opening)
    subscriber.close()
    follower.join(WAIT_SECONDS)
    assert not follower.is_alive()
    with pytest.raises(rt.Closed):
        subscriber.poll()


def test_forked_child_raises_closed_and_leaves_pull_process_to_parent(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    """Another thread holds the subscriber's locks at the fork. In the child no thread would release them."""
    program = """
import os, sys, threading
import rt
root, endpoint, *files = sys.argv[1:]

def refused(use):
    try:
        use()
    except rt.Closed as error:
        return "parent process" in str(error)
    return False

def hold_locks():
    with subscriber._gate._changed, subscriber._reader._watch._closing, subscriber._reader._reading:
        is_held.set()
        is_forked.wait()

options = {"tls": rt.TLS(*files), "name": "sub", "retention": "own"}
with rt.Subscriber(root, "s", endpoints=[endpoint], **options) as subscriber:
    assert [message.value for message in subscriber.poll(timeout=60)] == [b"one"]
    is_held, is_forked = threading.Event(), threading.Event()
    threading.Thread(target=hold_locks).start()
    is_held.wait()
    child = os.fork()
    if not child:
        uses = [
            lambda: subscriber.poll(timeout=60),
            lambda: subscriber.next_batch(timeout=60),
            lambda: next(iter(subscriber)),
            lambda: subscriber.ack(1),
            lambda: subscriber.trim(1),
            lambda: subscriber.seek(0),
            subscriber.pause,
            subscriber.resume,
            subscriber.call_off,
        ]
        found = [refused(use) for use in uses]
        subscriber.close()
        os._exit(7 if all(found) else found.index(False) + 10)
    is_forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    subscriber.ack(1)
    os.write(1, b"forked")
    sys.stdin.read(1)
    assert [message.value for message in subscriber.poll(timeout=60)] == [b"two"]
"""
    source.publish(b"one")
    tls = tls_of(pki, "sub")
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path, source.endpoint]
        + [os.fspath(path) for path in (tls.ca, tls.cert, tls.key)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], WAIT_SECONDS)[0], "it hangs"
            assert process.stdout.read(6) == b"forked"
            source.publish(b"two")
            process.communicate(b"x", timeout=WAIT_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0


def test_certificate_of_another_ca_raises_certificate_error(
    tmp_path: Path, pki: Path, source: PullSource
) -> None:
    other = tmp_path / "other"
    init_ca(other)
    issue(other, Identity("s", "subscriber", "sub"))
    with (
        subscriber_of(tmp_path, pki, source, tls=tls_of(other, "sub")) as subscriber,
        pytest.raises(rt.CertificateError),
    ):
        subscriber.poll(timeout=WAIT_SECONDS)
