"""Publishers with endpoints: replication, waiting, trimming, and the push process that outlives them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from push_node import NodesInThread, PushNode

import rt
from replicator.push.lock import lock_push
from rt.client.local_retention import TrimmableLog, trimmable
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import SealedSegment, TrimReason
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from rt.sidecar import push_pool
from rt.sidecar.progress_file import Level, ProgressFile, PushState

WAIT_SECONDS = 120


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    init_ca(directory)
    issue(directory, Identity("s", "node", "n1"), loopback=True)
    issue(directory, Identity("s", "publisher", "feed"))
    return directory


def tls_of(pki: Path, name: str = "feed") -> TLS:
    return TLS(pki / "ca.crt", pki / f"{name}.crt", pki / f"{name}.key")


@contextlib.contextmanager
def three_nodes(pki: Path) -> Iterator[NodesInThread]:
    with NodesInThread(*(PushNode(f"n{index}") for index in (1, 2, 3)), tls=tls_of(pki, "n1")) as nodes:
        yield nodes
    assert [node.faults for node in nodes.nodes] == [[], [], []]


def publisher_of(root: Path, pki: Path, nodes: NodesInThread, **options: Any) -> rt.Publisher:
    endpoints = [node.endpoint for node in nodes.nodes]
    settings = {"publisher_id": "feed", "linger_ms": 0, "endpoints": endpoints, "tls": tls_of(pki)}
    return rt.Publisher(root, "s", **(settings | options))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_served(directory: str | Path) -> bool:
    try:
        lock_push(str(directory)).close()
    except rt.DirectoryLocked:
        return True
    return False


@contextlib.contextmanager
def one_node(pki: Path) -> Iterator[tuple[PushNode, NodesInThread]]:
    """Start a cluster of one node for one session, because a node of these tests knows only one session."""
    node = PushNode(members=1)
    with NodesInThread(node, tls=tls_of(pki, "n1")) as nodes:
        yield node, nodes
    assert node.faults == []


@pytest.fixture(params=[1])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the number of processor cores, and start with a push pool without processes."""
    count = int(request.param)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    monkeypatch.setattr(push_pool, "_shared", [push_pool.PushPool()])
    return count


def pushes() -> list[int]:
    """Return the ids of the push processes of this process."""
    until(lambda: push_pool.shared().pids)
    return push_pool.shared().pids


# Without nodes


def test_wait_without_endpoints_raises_value_error(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish(b"one")
        publisher.flush()
        assert publisher.progress == (1, 0, 0)
        with pytest.raises(ValueError, match="without endpoints"):
            publisher.wait(0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"endpoints": ["localhost:1"]}, "endpoints without tls"),
        ({"endpoints": "localhost:1"}, "a sequence of"),
        ({"local_persistence": -1}, "local_persistence"),
    ],
)
def test_invalid_endpoint_options_raise_value_error_and_create_no_directory(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        rt.Publisher(tmp_path, "s", publisher_id="feed", **options)
    assert not list(tmp_path.iterdir())


def sealed(run: int, roll: int, end: int, sealed_ns: int = 0) -> SealedSegment:
    return SealedSegment(SegmentId(run, roll), 0, end, 100, 0, 0, 0, sealed_ns)


def test_only_prefix_of_merged_segments_is_trimmable() -> None:
    segments = [sealed(0, 0, 10), sealed(0, 1, 20), sealed(1, 0, 30)]
    assert trimmable(segments, Level(0, 9), now_ns=5, persistence_ns=0) == TrimmableLog(None, None)
    assert trimmable(segments, Level(0, 10), now_ns=5, persistence_ns=0).before == SegmentId(0, 1)
    assert trimmable(segments, Level(0, 25), now_ns=5, persistence_ns=0).before == SegmentId(0, 2)
    assert trimmable(segments, Level(1, 25), now_ns=5, persistence_ns=0).before == SegmentId(0, 2)
    assert trimmable(segments, Level(2, 0), now_ns=5, persistence_ns=0).before == SegmentId(1, 1)
    gone = [segments[0].trimmed(TrimReason.MERGED, 1), *segments[1:]]
    assert trimmable(gone, Level(0, 10), now_ns=5, persistence_ns=0) == TrimmableLog(None, None)


@given(
    st.lists(st.integers(0, 100), max_size=6),
    st.integers(0, 6),
    st.integers(0, 200),
    st.integers(0, 60),
)
def test_segments_are_trimmable_only_after_local_persistence_and_wait_is_returned(
    sealed_ns: list[int], merged: int, now_ns: int, persistence_ns: int
) -> None:
    segments = [sealed(0, roll, roll + 1, at) for roll, at in enumerate(sorted(sealed_ns))]
    before, wait_ns = trimmable(segments, Level(0, merged), now_ns=now_ns, persistence_ns=persistence_ns)
    gone = [segment for segment in segments if before is not None and segment.id < before]
    due = [
        segment
        for segment in segments[:merged]
        if not persistence_ns or segment.sealed_ns + persistence_ns <= now_ns
    ]
    assert gone == due
    waiting = segments[len(gone) : merged]
    assert (wait_ns is None) == (not waiting)
    if wait_ns is not None:
        assert 0 < wait_ns <= persistence_ns


# With nodes


@pytest.mark.slow
def test_wait_returns_when_message_is_replicated_and_merged(tmp_path: Path, pki: Path) -> None:
    with three_nodes(pki) as nodes, publisher_of(tmp_path, pki, nodes) as publisher:
        number = publisher.publish(b"one")
        publisher.wait(number, level="replicated", timeout=WAIT_SECONDS)
        publisher.wait(number, timeout=WAIT_SECONDS)
        assert publisher.progress == (1, 1, 1)
        assert publisher.publish_many([b"x"] * 500) == range(1, 501)
        publisher.wait(500, timeout=WAIT_SECONDS)
        for wrong in (-1, 501):
            with pytest.raises(ValueError, match="never published"):
                publisher.wait(wrong)
        with pytest.raises(ValueError, match="level="):
            publisher.wait(0, level="durable")  # type: ignore[arg-type]
        for node in nodes.nodes:
            until(lambda node=node: node.holds(publisher.directory))


@pytest.mark.slow
def test_on_merged_receives_increasing_merged_ends_even_after_it_raises(tmp_path: Path, pki: Path) -> None:
    told: list[int] = []
    threads: set[str] = set()

    def on_merged(end: int) -> None:
        told.append(end)
        threads.add(threading.current_thread().name)
        if len(told) == 1:
            publisher.publish(b"more")
            raise ValueError("a fault of the handler, which must stop nothing")

    with one_node(pki) as (_, nodes):
        with publisher_of(tmp_path, pki, nodes, on_merged=on_merged) as publisher:
            publisher.publish(b"one")
            until(lambda: told and told[-1] == 2)
            publisher.publish_many([b"x"] * 500)
            publisher.wait(501, timeout=WAIT_SECONDS)
        until(lambda: told[-1] == 502)
    assert told == sorted(set(told))
    assert threads == {"rt-publisher-merged-feed"}
    until(lambda: not [one for one in threading.enumerate() if one.name in threads])


@pytest.mark.slow
def test_wait_times_out_without_majority_and_can_be_retried(tmp_path: Path, pki: Path) -> None:
    with three_nodes(pki) as nodes:
        for node in nodes.nodes:
            node.merges = False
            nodes.do(node.stop)
        with publisher_of(tmp_path, pki, nodes) as publisher:
            number = publisher.publish(b"one")
            with pytest.raises(rt.Timeout, match="number 0 is not replicated yet"):
                publisher.wait(number, level="replicated", timeout=0.01)
            for node in nodes.nodes[:2]:
                nodes.do(lambda node=node: node.start(tls_of(pki, "n1")))
            publisher.wait(number, level="replicated", timeout=WAIT_SECONDS)
            with pytest.raises(rt.Timeout, match="not merged yet"):
                publisher.wait(number, timeout=0)
            assert publisher.progress == (1, 1, 0)


@pytest.mark.slow
def test_fenced_publisher_raises_fenced_and_is_not_pushed_again(tmp_path: Path, pki: Path) -> None:
    with three_nodes(pki) as nodes:
        for node in nodes.nodes:
            node.refusal = rt.Overloaded("try again")
        publisher = publisher_of(tmp_path, pki, nodes)
        with pytest.raises(rt.Fenced), publisher:
            number = publisher.publish(b"one")
            for node in nodes.nodes:
                node.refusal = rt.Fenced("a newer incarnation took over")
            with pytest.raises(rt.Fenced, match="rejects further data of this session"):
                publisher.wait(number, timeout=WAIT_SECONDS)
            until(lambda: not is_served(publisher.directory))
            asked = len(nodes.nodes[0].hellos)
            for node in nodes.nodes:
                node.refusal = None
            with publisher_of(tmp_path / "other", pki, nodes, publisher_id="feed~2") as other:
                other.wait(other.publish(b"one"), timeout=WAIT_SECONDS)
            said = [hello.session for hello in nodes.nodes[0].hellos[asked:]]
            assert said.count("feed") <= 1  # A hello was under way when another node refused the session.
            assert not is_served(publisher.directory)


@pytest.mark.slow
@pytest.mark.usefixtures("cores")
def test_concurrent_and_successive_publishers_share_one_push_process(tmp_path: Path, pki: Path) -> None:
    with one_node(pki) as (one, nodes), one_node(pki) as (other, others):
        with (
            publisher_of(tmp_path, pki, nodes) as first,
            publisher_of(tmp_path, pki, others, publisher_id="feed~2") as second,
        ):
            for publisher in (first, second):
                publisher.wait(publisher.publish(publisher.session.encode()), timeout=WAIT_SECONDS)
            assert one.holds(first.directory)
            assert other.holds(second.directory)
            (pid,) = pushes()
        for publisher in (first, second):
            until(lambda publisher=publisher: not is_served(publisher.directory))
        with publisher_of(tmp_path, pki, nodes) as third:
            third.wait(third.publish(b"again"), timeout=WAIT_SECONDS)
            assert pushes() == [pid]
        assert [thread.name for thread in threading.enumerate()].count("rt-pushing") <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("cores")
def test_killed_push_process_restarts_for_open_and_closed_publishers(tmp_path: Path, pki: Path) -> None:
    with one_node(pki) as (_, nodes), one_node(pki) as (other, others):
        others.do(other.stop)
        with publisher_of(tmp_path, pki, nodes) as open_one:
            closed = publisher_of(tmp_path, pki, others, publisher_id="feed~2")
            closed.publish(b"left")
            until(lambda: is_served(closed.directory))
            closed.close(timeout=0)
            open_one.wait(open_one.publish(b"one"), timeout=WAIT_SECONDS)
            (pid,) = pushes()
            os.kill(pid, signal.SIGKILL)
            open_one.wait(open_one.publish(b"two"), timeout=WAIT_SECONDS)
            assert pushes() != [pid]
            others.do(lambda: other.start(tls_of(pki, "n1")))
            until(lambda: other.holds(closed.directory) and not is_served(closed.directory))


@pytest.mark.slow
def test_push_process_sends_messages_left_unsent_at_close(tmp_path: Path, pki: Path) -> None:
    with three_nodes(pki) as nodes:
        for node in nodes.nodes:
            node.merges = False  # A majority would have every message that one node merges.
            nodes.do(node.stop)
        publisher = publisher_of(tmp_path, pki, nodes)
        publisher.publish_many([bytes(1000)] * 1000)
        until(lambda: is_served(publisher.directory))
        publisher.close(timeout=0)
        assert is_served(publisher.directory)
        for node in nodes.nodes:
            nodes.do(lambda node=node: node.start(tls_of(pki, "n1")))
        until(lambda: not is_served(publisher.directory))
        assert sum(node.holds(publisher.directory) for node in nodes.nodes) >= 2


@pytest.mark.slow
def test_close_waits_until_all_messages_are_replicated_and_merged(tmp_path: Path, pki: Path) -> None:
    with three_nodes(pki) as nodes:
        publisher = publisher_of(tmp_path, pki, nodes)
        publisher.publish_many([bytes(1000)] * 2000)
        publisher.close(timeout=WAIT_SECONDS)
        assert publisher.progress == (2000, 2000, 2000)
        publisher.close()


@pytest.mark.slow
@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("cores", [1, 2], indirect=True)
def test_reopened_publisher_takes_over_from_draining_push_client(tmp_path: Path, pki: Path) -> None:
    with three_nodes(pki) as nodes:
        for node in nodes.nodes:
            nodes.do(node.stop)
        first = publisher_of(tmp_path, pki, nodes)
        first.publish(b"one")
        until(lambda: is_served(first.directory))
        first.close(timeout=0)
        with publisher_of(tmp_path, pki, nodes, local_persistence=3600) as second:
            second.publish(b"two")
            for node in nodes.nodes:
                nodes.do(lambda node=node: node.start(tls_of(pki, "n1")))
            second.wait(1, timeout=WAIT_SECONDS)
            assert second.progress == (2, 2, 2)
            for node in nodes.nodes:
                until(lambda node=node: node.holds(second.directory))


@pytest.mark.slow
def test_merged_sealed_segments_are_deleted_unless_local_persistence_keeps_them(
    tmp_path: Path, pki: Path
) -> None:
    with three_nodes(pki) as nodes:
        with publisher_of(tmp_path, pki, nodes, roll_bytes=10_000) as publisher:
            for _ in range(10):
                publisher.publish_many([bytes(100)] * 50)
                publisher.flush()
            publisher.wait(499, timeout=WAIT_SECONDS)
            last = publisher._log.writer.last_id
            assert last is not None
            until(lambda: kept(publisher) == [last.file_name])
            reasons = {segment.reason for segment in publisher._log.writer.table.segments}
            assert reasons == {TrimReason.MERGED}
        with publisher_of(tmp_path, pki, nodes, roll_bytes=10_000, local_persistence=3600) as publisher:
            for _ in range(5):
                publisher.publish_many([bytes(100)] * 50)
                publisher.flush()
            publisher.wait(749, timeout=WAIT_SECONDS)
            assert len(kept(publisher)) > 3


def kept(publisher: rt.Publisher) -> list[str]:
    found = []
    for path in sorted(Path(publisher.directory).glob("log.*")):
        with contextlib.suppress(FileNotFoundError):  # The file may be deleted meanwhile.
            found += [path.name] * (path.stat().st_size > 0)
    return found


PROGRAM = """
import os, sys
import rt
root, what, *arguments = sys.argv[1:]
files, endpoints = arguments[:3], arguments[3:]
publishers = [
    rt.Publisher(
        root, "s", publisher_id=f"feed~{number}", endpoints=[endpoint], tls=rt.TLS(*files), linger_ms=0
    )
    for number, endpoint in enumerate(endpoints)
]
for publisher in publishers:
    for count in range(100):
        publisher.publish_many([bytes(1000)] * 20)
    publisher.flush()
if what == "close":
    for publisher in publishers:
        publisher.close(timeout=0)
    sys.exit()
if os.fork() == 0:
    try:
        publishers[0].wait(0)
    except rt.Closed:
        os.write(1, b"closed ")
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["close", "kill"])
def test_written_messages_reach_nodes_after_publisher_process_closes_or_is_killed(
    tmp_path: Path, pki: Path, what: str
) -> None:
    with one_node(pki) as (one, nodes), one_node(pki) as (other, others):
        nodes.do(one.stop)
        others.do(other.stop)
        directories = [tmp_path / "s" / "sessions" / f"feed~{number}" for number in (0, 1)]
        files = [f"{pki}/{name}" for name in ("ca.crt", "feed.crt", "feed.key")]
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path, what, *files, one.endpoint, other.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.wait(WAIT_SECONDS) == (0 if what == "close" else -signal.SIGKILL)
            if what == "kill":
                # Written by a fork of the process, which still runs.
                assert process.stdout.read(7) == b"closed "
            until(lambda: all(map(is_served, directories)))
            until(lambda: all((directory / "push.log").exists() for directory in directories))
            nodes.do(lambda: one.start(tls_of(pki, "n1")))
            others.do(lambda: other.start(tls_of(pki, "n1")))
            until(lambda: not any(map(is_served, directories)))
            assert one.holds(directories[0])
            assert other.holds(directories[1])
            process.stdin.close()
            if what == "close":
                process.stdout.read()  # No process has stdout or stderr open any more.
                assert process.stderr is not None
                process.stderr.read()


@pytest.mark.slow
def test_rejection_reason_is_in_program_log_and_push_log_file(
    tmp_path: Path, pki: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with one_node(pki) as (node, nodes):
        node.refusal = rt.InvalidName("no such stream here")
        with (
            pytest.raises(rt.InvalidName, match="no such stream here"),  # Raised by `close`.
            publisher_of(tmp_path, pki, nodes) as publisher,
        ):
            with pytest.raises(rt.InvalidName, match="no such stream here"):
                publisher.wait(publisher.publish(b"one"), timeout=WAIT_SECONDS)
            file = Path(publisher.directory, "push.log")
            until(lambda: file.exists() and "no such stream here" in file.read_text())

            def is_of_push(record: logging.LogRecord) -> bool:
                said = record.getMessage()
                blocked = f"push_blocked path={publisher.directory} "
                return said.startswith(blocked) and "no such stream" in said

            until(lambda: any(map(is_of_push, caplog.records)))
            (record,) = set(filter(is_of_push, caplog.records))
            assert (record.name, record.levelname) == ("replicator", "WARNING")


@pytest.mark.slow
def test_push_process_outliving_its_program_appends_to_push_log_of_session(tmp_path: Path, pki: Path) -> None:
    with one_node(pki) as (node, nodes):
        nodes.do(node.stop)
        directory = tmp_path / "s" / "sessions" / "feed~0"
        files = [f"{pki}/{name}" for name in ("ca.crt", "feed.crt", "feed.key")]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, tmp_path, "close", *files, node.endpoint],
            stderr=subprocess.PIPE,
            check=True,
        )
        until(lambda: is_served(directory))
        until((directory / "push.log").exists)
        before = (directory / "push.log").read_text()
        node.refusal = rt.InvalidName("no such stream here")
        nodes.do(lambda: node.start(tls_of(pki, "n1")))
        until(lambda: not is_served(directory))
    text = (directory / "push.log").read_text()
    assert text.startswith(before)
    assert f"warning replicator push_blocked path={directory} " in text
    assert "no such stream here" in text
    assert b"no such stream here" not in done.stderr


@pytest.mark.slow
def test_push_state_left_by_earlier_push_client_is_ignored(tmp_path: Path, pki: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        origin, directory = publisher._log.writer.identity.origin, publisher.directory
    file = ProgressFile(directory, origin, b"")
    file.write(replicated=Level(0, 0), merged=Level(0, 0), state=PushState.FENCED)
    file.close()
    with three_nodes(pki) as nodes:
        with publisher_of(tmp_path, pki, nodes) as publisher:
            publisher.wait(publisher.publish(b"one"), timeout=WAIT_SECONDS)
        until(lambda: not is_served(directory))  # A stream that still runs would continue without a hello.
        for _ in range(2):
            for node in nodes.nodes:
                node.refusal = rt.Overloaded("try again")
            publisher = publisher_of(tmp_path, pki, nodes)
            number = publisher.publish(b"two")
            for node in nodes.nodes:
                node.refusal = rt.Fenced("a newer incarnation took over")
            with pytest.raises(rt.Fenced):
                publisher.wait(number, timeout=WAIT_SECONDS)
            with pytest.raises(rt.Fenced):
                publisher.close()
