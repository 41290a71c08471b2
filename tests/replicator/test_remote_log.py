"""Reading a merged log from nodes gives the messages of their files, even if nodes restart."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merged_logs import Feeds
from range_nodes import RangeNodes, range_nodes

import rt
from replicator.pull.remote_log import RemoteLog
from rt.cluster_epoch import epoch_of, forced_number
from rt.events import BadMessage, SkipForward
from rt.log.disk import REAL
from rt.log.read.log_source import NO_END
from rt.log.read.outline import outline
from rt.log.read.projection import EVERYTHING, Projection
from rt.log.read.range_reader import RangeReader
from rt.log.read.topic_patterns import TopicPatterns
from rt.net.grpc_errors import NothingMergedYet, Unreachable
from rt.spark.source.log_source import LocalLog

SHORT = 0.5
"""For tests of what happens when no node is left."""


def refuse(event: SkipForward | BadMessage) -> None:
    raise AssertionError(event)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def feeds(root: Path) -> Iterator[Feeds]:
    """Three segments. The second segment has a few MB, so that its index has hops."""
    made = Feeds(root)
    made.fill(60)
    made.roll()
    for _ in range(120):
        made.publish("c", [os.urandom(20_000) for _ in range(5)], "large", range(5))
        made.publish("a", [os.urandom(50)] * 7, "small", range(7))
        made.merge()
    made.roll()
    made.fill(60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def nodes(root: Path, feeds: Feeds) -> Iterator[RangeNodes]:
    with range_nodes(root) as running:
        yield running


@pytest.fixture
def log(nodes: RangeNodes) -> Iterator[RemoteLog]:
    log = open_log(nodes)
    yield log
    log.close()


def open_log(
    nodes: RangeNodes, *, patience_seconds: float = 60.0, epoch: int = 0, **options: str
) -> RemoteLog:
    files = {**nodes.files, **options}
    return RemoteLog(nodes.endpoints, "s", patience_seconds=patience_seconds, epoch=epoch, **files)


def read(log: RemoteLog, start: int, end: int, interest: Projection = EVERYTHING) -> list[rt.Message]:
    return [message for batch in log.read(start, end, interest, refuse) for message in batch.messages()]


def test_remote_bounds_and_outline_equal_those_of_node_files(feeds: Feeds, log: RemoteLog) -> None:
    end = feeds.rows()[-1].position + 1
    assert log.bounds() == (0, end)
    told = list(log.outline(70, end))
    assert told == list(outline(REAL, feeds.path, 70, end, stride_bytes=4 * 2**20))
    assert list(log.outline(5, 5)) == []


@settings(max_examples=25)
@given(data=st.data())
def test_remote_read_of_any_range_equals_read_of_node_files(
    feeds: Feeds, nodes: RangeNodes, data: st.DataObject
) -> None:
    rows = feeds.rows()
    start = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(start, len(rows)))
    interest = Projection(
        data.draw(st.booleans()),
        data.draw(st.none() | st.frozensets(st.sampled_from("abc"))),
        data.draw(
            st.none()
            | st.frozensets(st.sampled_from(["trade", "small", "large"]))
            | st.sets(st.sampled_from(["tr*", "?mall", "large", "none"]), min_size=1).map(TopicPatterns)
        ),
    )
    log = open_log(nodes)
    try:
        got = read(log, start, end, interest)
    finally:
        log.close()
    reader = RangeReader(feeds.path, start, end, interest=interest, on_loss=refuse)
    assert got == [message for batch in reader.batches() for message in batch.messages()]


def test_small_range_within_segment_transfers_less_than_half_of_segment(feeds: Feeds, log: RemoteLog) -> None:
    start = next(row.position for row in feeds.rows() if row.topic == "large") + 300
    got = read(log, start, start + 5)
    assert [row.position for row in got] == list(range(start, start + 5))
    assert log.received_bytes < 1.5 * 2**20 < os.path.getsize(f"{feeds.path}/log.0.1") / 2


def test_messages_of_other_topics_are_not_sent(feeds: Feeds, log: RemoteLog) -> None:
    rows = feeds.rows()
    got = read(log, 0, len(rows), Projection(topics=frozenset(["small"])))
    assert got == [row for row in rows if row.topic == "small"]
    assert log.received_bytes < 2 * sum(len(row.value) + 100 for row in got)
    whole, log.received_bytes = log.received_bytes, 0
    assert read(log, 0, len(rows), Projection(topics=TopicPatterns(["none*"]))) == []
    assert log.received_bytes < 1000 < whole


def test_topic_name_with_pattern_characters_matches_only_itself_on_node(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path, ["a"])
    for topic in ("a*", "ab", "a[b]"):
        feeds.publish("a", [topic.encode()], topic, [1])
    end = feeds.merge().stop
    with range_nodes(tmp_path, 1) as nodes:
        log = open_log(nodes)
        for topic in ("a*", "a[b]"):
            got = read(log, 0, end, Projection(topics=frozenset([topic])))
            assert [row.value for row in got] == [topic.encode()]
        log.close()
    feeds.close()


def test_read_continues_on_another_node_when_node_stops(feeds: Feeds, nodes: RangeNodes) -> None:
    rows = feeds.rows()
    log = open_log(nodes)
    batches = log.read(0, len(rows), EVERYTHING, refuse)
    got = list(next(batches).messages())
    victim = nodes.asked(log)
    nodes.stop(victim)
    try:
        got += [message for batch in batches for message in batch.messages()]
    finally:
        nodes.start(victim)
        log.close()
    assert got == rows
    assert nodes.asked(log) != victim


FIRST, FORCED = epoch_of(1, 0), epoch_of(forced_number(1), 7)


def test_read_raises_diverged_after_forced_reset(feeds: Feeds, nodes: RangeNodes) -> None:
    log = open_log(nodes)
    with nodes.in_epochs(FIRST, FIRST):
        batches = log.read(0, len(feeds.rows()), EVERYTHING, refuse)
        next(batches)
        victim = nodes.asked(log)
        with nodes.in_epochs(FORCED, FORCED):
            nodes.stop(victim)
            try:
                with pytest.raises(rt.Diverged, match="a forced reset gave positions"):
                    list(batches)
                with pytest.raises(rt.Diverged):
                    log.find_time(0, 5, 0)
            finally:
                nodes.start(victim)
    log.close()


@pytest.mark.parametrize("left", [FIRST, epoch_of(forced_number(1), 8)])
def test_reader_avoids_node_in_epoch_other_than_its_forced_reset(
    feeds: Feeds, nodes: RangeNodes, left: int
) -> None:
    with nodes.in_epochs(left, FORCED):
        log = open_log(nodes, epoch=FORCED)
        log._nodes.target = nodes.endpoints[0]
        assert read(log, 0, 5) == feeds.rows()[:5]
        assert nodes.asked(log) == 1
        log.close()


def test_reader_continues_after_unforced_reset(feeds: Feeds, nodes: RangeNodes) -> None:
    log = open_log(nodes)
    for number in (1, 2):
        with nodes.in_epochs(epoch_of(number, 0), epoch_of(number, 0)):
            assert read(log, 0, 5) == feeds.rows()[:5]
            assert log.epoch == epoch_of(number, 0)
    log.close()


@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("before", [0, 5])
def test_range_without_end_continues_with_later_messages(
    tmp_path: Path, is_rolled: bool, before: int
) -> None:
    feeds = Feeds(tmp_path)
    feeds.fill(20)
    with range_nodes(tmp_path) as nodes:
        log = open_log(nodes)
        start = len(feeds.rows()) - before
        if is_rolled:
            feeds.roll()
        batches = log.read(start, NO_END, EVERYTHING, refuse)
        got = list[rt.Message]()
        for _ in range(3):
            feeds.fill(5)
            while len(got) < len(feeds.rows()) - start:
                got += next(batches).messages()
        assert got == feeds.rows()[start:]
        nodes.stop(nodes.asked(log))
        feeds.fill(5)
        while len(got) < len(feeds.rows()) - start:
            got += next(batches).messages()
        assert got == feeds.rows()[start:]
        batches.close()
        log.close()
    feeds.close()


def test_bounds_raise_unreachable_after_patience_when_all_nodes_are_stopped(
    feeds: Feeds, nodes: RangeNodes
) -> None:
    log, patient = open_log(nodes, patience_seconds=SHORT), open_log(nodes)
    before = list(patient.outline(0, 5))
    for index in (0, 1):
        nodes.stop(index)
    try:
        with pytest.raises(Unreachable):
            log.bounds()
    finally:
        for index in (0, 1):
            nodes.start(index)
    assert list(patient.outline(0, 5)) == before
    log.close()
    patient.close()


@pytest.mark.parametrize("stopped", [(), (0, 1)], ids=["at the end of the log", "without nodes"])
def test_interrupt_by_another_thread_ends_blocked_read_with_closed(
    nodes: RangeNodes, stopped: tuple[int, ...]
) -> None:
    log = open_log(nodes)
    end = log.bounds()[1]
    batches = log.read(end - 1, NO_END, EVERYTHING, refuse)
    next(batches)
    errors: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(rt.Closed) as caught:
            next(batches)
        errors.append(caught.value)

    for index in stopped:
        nodes.stop(index)
    try:
        reader = threading.Thread(target=wait)
        reader.start()
        while stopped and not log._failures:
            time.sleep(0.01)
        log.interrupt()
        reader.join()
        with pytest.raises(rt.Closed):
            read(log, 0, 5)
        log.close()
    finally:
        for index in stopped:
            nodes.start(index)
    assert "another thread" in str(errors[0])


def test_unreachable_error_names_each_node_with_reason_and_each_is_logged_once(
    nodes: RangeNodes, caplog: pytest.LogCaptureFixture
) -> None:
    log = RemoteLog(nodes.endpoints, "s", **nodes.files, connect_seconds=SHORT)
    for index in (0, 1):
        nodes.stop(index)
    try:
        with pytest.raises(Unreachable) as error:
            log.bounds()
    finally:
        for index in (0, 1):
            nodes.start(index)
        log.close()
    reasons = "; ".join(f"{endpoint}: connection refused" for endpoint in nodes.endpoints)
    assert str(error.value) == (
        f"no node of stream s answers: got {reasons}, expected an answer within 0.5 s. "
        "Does the node run, with that port?"
    )
    for endpoint in nodes.endpoints:
        (_,) = [one for one in caplog.records if f"endpoint={endpoint} " in one.getMessage()]


def test_connect_timeout_does_not_apply_to_nodes_after_first_answer(nodes: RangeNodes) -> None:
    log = RemoteLog(nodes.endpoints, "s", **nodes.files, connect_seconds=60, patience_seconds=SHORT)
    log.bounds()
    for index in (0, 1):
        nodes.stop(index)
    try:
        with pytest.raises(Unreachable, match="UNAVAILABLE"):
            list(log.outline(0, 5))
    finally:
        for index in (0, 1):
            nodes.start(index)
        log.close()


def test_read_beyond_log_end_raises_unreachable_after_patience(nodes: RangeNodes) -> None:
    log = open_log(nodes, patience_seconds=SHORT)
    end = log.bounds()[1]
    with pytest.raises(Unreachable, match="less of the log than was requested"):
        read(log, end - 1, end + 1)
    log.close()


def test_hold_is_sent_to_one_node_and_again_to_its_replacement(nodes: RangeNodes) -> None:
    log = open_log(nodes)
    for node in nodes.nodes.values():
        node.acknowledged.clear()
    log.hold("sub", 7)
    list(log.outline(0, 5))
    first = nodes.asked(log)
    second = 1 - first
    assert (nodes.nodes[first].acknowledged, nodes.nodes[second].acknowledged) == ([("sub", 7)], [])
    nodes.stop(first)
    try:
        list(log.outline(0, 5))
        log.hold("sub", 9)
    finally:
        nodes.start(first)
        log.close()
    assert nodes.nodes[second].acknowledged == [("sub", 7), ("sub", 9)]
    assert nodes.nodes[second].confirmed == ["sub", "sub"], "the node answers once the cluster holds the log"


def test_hold_for_name_not_in_certificate_raises_certificate_error(log: RemoteLog) -> None:
    with pytest.raises(rt.CertificateError, match="only a subscriber itself can acknowledge"):
        log.hold("other", 7)


def test_reader_without_permission_or_key_file_raises_certificate_error(nodes: RangeNodes) -> None:
    files = {name: path.replace("sub.", "feed.") for name, path in nodes.files.items()}
    log = open_log(nodes, **files)
    with pytest.raises(rt.CertificateError):
        log.bounds()
    log.close()
    with pytest.raises(rt.CertificateError, match="nothing"):
        open_log(nodes, key="/nothing")


@pytest.mark.parametrize("topics", [None, TopicPatterns(["*"]), TopicPatterns(["none*"])])
def test_trimmed_range_is_reported_and_skipped(tmp_path: Path, topics: TopicPatterns | None) -> None:
    feeds = Feeds(tmp_path)
    first = feeds.fill(10)
    feeds.roll()
    second = feeds.fill(10)
    feeds.roll()
    third = feeds.fill(10)
    feeds.trim(1)
    with range_nodes(tmp_path, 1) as nodes:
        log = open_log(nodes)
        assert log.bounds() == (first.stop, third.stop)
        events: list[SkipForward | BadMessage] = []
        got = [
            position
            for batch in log.read(3, third.stop, Projection(topics=topics), events.append)
            for position in batch.positions.tolist()
        ]
        assert got == ([] if topics is not None and "x" not in topics else [*second, *third])
        assert events == [SkipForward(3, first.stop, "time")]
        events.clear()
        assert list(log.read(3, 5, Projection(topics=topics), events.append)) == []
        assert events == [SkipForward(3, 5, "trimmed")]
        log.close()
    feeds.close()


def test_corrupt_bytes_of_node_raise_corrupt_and_are_not_returned(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    for _ in range(20):
        feeds.publish("a", [bytes(200_000)], "t", [1])
        feeds.merge()
    feeds.close()
    with open(f"{feeds.path}/log.0.0", "r+b") as file:
        file.seek(300_000)
        file.write(b"\1")
    with range_nodes(tmp_path, 1) as nodes:
        log = open_log(nodes, patience_seconds=SHORT)
        got: list[int] = []
        with pytest.raises(rt.Corrupt, match="a node's bytes do not verify: values fail"):
            for batch in log.read(0, 20, EVERYTHING, refuse):
                got += batch.positions.tolist()
        assert got == [0]
        log.close()


def test_time_search_in_files_and_on_nodes_equals_full_scan(feeds: Feeds, log: RemoteLog) -> None:
    rows = feeds.rows()
    local = LocalLog(feeds.path)
    stamps = sorted({row.timestamp_ns for row in rows})
    for wanted in (*stamps[:: len(stamps) // 12], stamps[-1], stamps[-1] + 1):
        dumb = next((row.position for row in rows if row.timestamp_ns >= wanted), len(rows))
        assert local.find_time(0, len(rows), wanted) == dumb
        assert log.find_time(0, len(rows), wanted) == dumb
    local.close()


def test_log_without_messages_has_empty_bounds_until_first_merge(tmp_path: Path) -> None:
    """A stream may be read before the first message is published. From then on the nodes retain what the
    reader needs.
    """
    with range_nodes(tmp_path) as nodes:
        log = open_log(nodes)
        assert log.bounds() == (0, 0)
        log.hold("sub", 0)
        assert [node.acknowledged for node in nodes.nodes.values()] == [[("sub", 0)]] * 2
        feeds = Feeds(tmp_path)
        end = feeds.fill(3).stop
        deadline = time.monotonic() + 120
        while (found := log.bounds()) == (0, 0):
            assert time.monotonic() < deadline, "what was merged is not seen"
            time.sleep(0.02)
        assert found == (0, end)
        log.close()
        feeds.close()


@pytest.mark.parametrize("unsure", [[0], [1], [0, 1]])
def test_bounds_raise_unreachable_if_any_node_cannot_confirm_empty_log(
    tmp_path: Path, unsure: list[int]
) -> None:
    """A wiped node also has no messages, but it knows that messages are missing."""
    with range_nodes(tmp_path) as nodes:
        for index in unsure:
            nodes.nodes[index].is_empty = False
        log = open_log(nodes, patience_seconds=SHORT)
        with pytest.raises(Unreachable, match="this node has nothing of the log yet"):
            log.bounds()
        log.close()


def test_deleted_log_with_known_messages_raises_nothing_merged_yet(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path / "before")
    feeds.fill(3)
    feeds.close()
    (tmp_path / "merged").symlink_to(feeds.path)
    with range_nodes(tmp_path) as nodes:
        log = open_log(nodes, patience_seconds=SHORT)
        assert log.bounds()[1] > 0
        (tmp_path / "merged").unlink()
        log._bounds = None  # Clear the cached bounds.
        with pytest.raises(NothingMergedYet):
            log.bounds()
        log.close()


def test_log_end_is_never_taken_from_node_with_fewer_messages(tmp_path: Path) -> None:
    """The node was wiped and is still copying. With its end, a query would read only a part, and a stream
    would wait.
    """
    feeds = Feeds(tmp_path)
    feeds.fill(3)
    feeds.log.sync()
    shutil.copytree(feeds.path, tmp_path / "less")
    end = feeds.fill(30).stop
    with range_nodes(tmp_path, 3) as nodes:
        nodes.nodes[1].merged = str(tmp_path / "less")
        for first in range(3):
            log = open_log(nodes)
            log._nodes.target = nodes.endpoints[first]
            assert log.bounds() == (0, end)
            log.close()
        log = open_log(nodes)
        assert log.bounds() == (0, end)
        log._nodes.target, log._bounds = nodes.endpoints[1], None
        end = feeds.fill(3).stop
        assert log.bounds() == (0, end)
        assert nodes.asked(log) != 1
        log.close()
    feeds.close()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_log_is_readable_without_majority_and_warning_is_logged(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    feeds = Feeds(tmp_path)
    end = feeds.fill(3).stop
    with range_nodes(tmp_path, 3) as nodes:
        log = open_log(nodes)
        for index in {0, 1, 2} - {left}:
            nodes.stop(index)
        assert log.bounds() == (0, end)
        assert "no_majority_reachable answers=1 nodes=3" in caplog.text
        log.close()
    feeds.close()


FORKED = """
import os, signal, sys
import rt
from replicator.pull.remote_log import RemoteLog
from rt.log.read.projection import EVERYTHING

endpoints, ca, cert, key = sys.argv[1].split(","), *sys.argv[2:]
log = RemoteLog(endpoints, "s", ca=ca, cert=cert, key=key)
end = log.bounds()[1]
messages = (message for batch in log.read(0, end, EVERYTHING, print) for message in batch.messages())
next(messages)
if os.fork() == 0:
    signal.alarm(30)
    uses = [lambda: [*messages], lambda: [*log.outline(0, end)], lambda: log.hold("sub", 0)]
    refused = 0
    for use in uses:
        try:
            use()
        except rt.Closed as error:
            refused += "parent process" in str(error)
    log.close()
    os._exit(7 if refused == len(uses) else 1)
status = os.wait()[1]
rest = [*messages]
log.close()
assert os.waitstatus_to_exitcode(status) == 7
assert len(rest) == end - 1
"""


def test_reader_in_forked_child_raises_closed_without_waiting(nodes: RangeNodes) -> None:
    arguments = [",".join(nodes.endpoints), *(nodes.files[name] for name in ("ca", "cert", "key"))]
    done = subprocess.run(
        [sys.executable, "-c", FORKED, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
