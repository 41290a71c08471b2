"""Replication problems of a publisher: the errors its calls raise, `status()`, `on_error` and the log."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from push_node import NodesInThread, PushNode

import rt
from rt.client import publisher as publishing
from rt.client.publisher_status import SegmentExtent, above, reasons, state_of
from rt.client.replication_problem import ReplicationProblem
from rt.client.wait_handle import WaitHandle
from rt.log.format.segment import SegmentId
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from rt.sidecar.progress_file import Level
from rt.sidecar.protocol import EndpointStatus
from sequencer.localcluster.loopback import free_port

WAIT_SECONDS = 120


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the PKI of the nodes. The publisher's CA file contains a second CA as well, as during a CA
    rotation.
    """
    directory, foreign = tmp_path_factory.mktemp("pki"), tmp_path_factory.mktemp("foreign")
    for one in (directory, foreign):
        init_ca(one)
        issue(one, Identity("s", "publisher", "feed"))
    issue(directory, Identity("s", "node", "n1"), loopback=True)
    shutil.copytree(foreign, directory / "foreign")
    both = (directory / "ca.crt").read_bytes() + (foreign / "ca.crt").read_bytes()
    (directory / "both.crt").write_bytes(both)
    return directory


def tls_of(pki: Path, name: str = "feed") -> TLS:
    return TLS(pki / "ca.crt", pki / f"{name}.crt", pki / f"{name}.key")


@contextlib.contextmanager
def three_nodes(pki: Path) -> Iterator[NodesInThread]:
    """Start three nodes. They are overloaded at first, so that a test can publish before it changes what they
    `refuse`.
    """
    nodes = [PushNode(f"n{index}") for index in (1, 2, 3)]
    with NodesInThread(*nodes, tls=tls_of(pki, "n1")) as running:
        refuse(running, rt.Overloaded("try again"))
        yield running
    assert [node.faults for node in nodes] == [[], [], []]


def refuse(nodes: NodesInThread, refusal: rt.RtError | None) -> None:
    for node in nodes.nodes:
        node.refusal = refusal


def publisher_of(root: Path, pki: Path, nodes: NodesInThread, **options: Any) -> rt.Publisher:
    endpoints = [node.endpoint for node in nodes.nodes]
    settings = {"publisher_id": "feed", "linger_ms": 0, "endpoints": endpoints, "tls": tls_of(pki)}
    return rt.Publisher(root, "s", **(settings | options))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def published(publisher: rt.Publisher) -> int:
    """Publish a message and return its number. If the push has found the problem before, the first call
    raises it.
    """
    with contextlib.suppress(rt.CertificateError):
        return publisher.publish(b"one")
    return publisher.publish(b"one")


def wait_until_mended(publisher: rt.Publisher, number: int) -> None:
    """Return when `number` is merged. Waiting raises the problem until it is repaired; wait again after each
    error.
    """
    while True:
        with contextlib.suppress(rt.CertificateError, rt.BadContents, rt.ProtocolViolation):
            publisher.wait(number, timeout=WAIT_SECONDS)
            return


def endpoints_without_nodes() -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(3)]


REFUSALS = [
    rt.CertificateError("only a publisher can push", got="rt://s/subscriber/feed", expected="role publisher"),
    rt.ClusterMismatch("another stream is served here", got="s", expected="t"),
    rt.ProtocolViolation("a second hello"),
    rt.BadContents("the batch cannot be decoded"),
    rt.InvalidName("not a valid name"),
]


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_refusal_is_raised_by_wait_and_close_and_reported_by_on_error_and_status(
    tmp_path: Path, pki: Path, refusal: rt.RtError
) -> None:
    told: queue.SimpleQueue[rt.RtError] = queue.SimpleQueue()
    with three_nodes(pki) as nodes:
        publisher = publisher_of(tmp_path, pki, nodes, on_error=told.put)
        number = publisher.publish(b"one")
        refuse(nodes, refusal)
        for _ in range(2):
            with pytest.raises(type(refusal)) as raised:
                publisher.wait(number, timeout=WAIT_SECONDS)
            assert raised.value.what == refusal.what
            assert f"stays in {publisher.directory}" in str(raised.value)
        error = told.get(timeout=WAIT_SECONDS)
        assert (type(error), error.what) == (type(refusal), refusal.what)
        status = publisher.status()
        assert (status.state, status.unsent_messages) == ("blocked", 1)
        assert status.error is not None
        assert {one.endpoint for one in status.endpoints} == {node.endpoint for node in nodes.nodes}
        assert not any(one.is_connected for one in status.endpoints)
        with pytest.raises(type(refusal), match=refusal.what):
            publisher.close()
        publisher.close()
        assert told.empty()
        assert publisher.status().state == "closed"


@pytest.mark.slow
def test_with_block_end_raises_refusal_and_messages_are_kept(tmp_path: Path, pki: Path) -> None:
    with three_nodes(pki) as nodes:
        publisher = publisher_of(tmp_path, pki, nodes)
        with pytest.raises(rt.CertificateError, match="only a publisher"), publisher:
            publisher.publish(b"one")
            refuse(nodes, rt.CertificateError("only a publisher can push"))
        with rt.LogReader(publisher.directory, position=0) as reader:
            assert [message.value for message in reader.poll()] == [b"one"]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["publish", "publish_many", "flush"])
def test_refusal_is_raised_once_by_next_call_and_then_messages_are_accepted(
    tmp_path: Path, pki: Path, call: str
) -> None:
    noticed = threading.Event()
    with three_nodes(pki) as nodes:
        publisher = publisher_of(tmp_path, pki, nodes, on_error=lambda _: noticed.set())
        publisher.publish(b"one")
        refuse(nodes, rt.CertificateError("only a publisher can push"))
        assert noticed.wait(WAIT_SECONDS)
        act = {
            "publish": lambda: publisher.publish(b"two"),
            "publish_many": lambda: publisher.publish_many([b"two"]),
            "flush": publisher.flush,
        }[call]
        with pytest.raises(rt.CertificateError):
            act()
        assert publisher.next_number == 1
        act()
        assert publisher.publish(b"more") == (1 if call == "flush" else 2)
        refuse(nodes, None)
        wait_until_mended(publisher, publisher.next_number - 1)
        publisher.close()


@pytest.mark.slow
def test_publisher_recovers_when_refusal_ends_and_raises_second_refusal(tmp_path: Path, pki: Path) -> None:
    told: queue.SimpleQueue[rt.RtError] = queue.SimpleQueue()
    with (
        three_nodes(pki) as nodes,
        publisher_of(tmp_path, pki, nodes, on_error=told.put) as publisher,
    ):
        refuse(nodes, rt.CertificateError("the certificate has expired"))
        told.get(timeout=WAIT_SECONDS)
        with pytest.raises(rt.CertificateError):
            publisher.publish(b"one")
        assert publisher.publish(b"one") == 0
        refuse(nodes, None)
        wait_until_mended(publisher, 0)
        until(lambda: publisher.status().state == "replicating")
        assert (publisher.status().error, publisher.status().unsent_messages) == (None, 0)
        for node in nodes.nodes:
            node.refusal = rt.CertificateError("only a publisher can push")
            nodes.do(node.stop)
            nodes.do(lambda node=node: node.start(tls_of(pki, "n1")))
        assert isinstance(told.get(timeout=WAIT_SECONDS), rt.CertificateError)
        with pytest.raises(rt.CertificateError):
            publisher.publish(b"two")
        assert publisher.publish(b"two") == 1
        refuse(nodes, None)
        wait_until_mended(publisher, 1)


@pytest.mark.slow
def test_certificate_refused_in_handshake_raises_certificate_error_until_renewed_on_disk(
    tmp_path: Path, pki: Path
) -> None:
    files = tmp_path / "files"
    shutil.copytree(pki / "foreign", files)
    shutil.copy(pki / "both.crt", files / "ca.crt")
    with (
        three_nodes(pki) as nodes,
        publisher_of(tmp_path, pki, nodes, tls=tls_of(files)) as publisher,
    ):
        refuse(nodes, None)
        number = published(publisher)
        with pytest.raises(rt.CertificateError, match="the node refuses our certificate"):
            publisher.wait(number, timeout=WAIT_SECONDS)
        assert not any(node.hellos for node in nodes.nodes)
        for name in ("feed.key", "feed.crt"):
            shutil.copy2(pki / name, files / f"new.{name}")
            os.replace(files / f"new.{name}", files / name)
        wait_until_mended(publisher, number)
        assert publisher.status().error is None
        publisher.publish(b"two")


@pytest.mark.slow
def test_missing_key_file_raises_certificate_error_until_it_is_restored(tmp_path: Path, pki: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name in ("ca.crt", "feed.crt", "feed.key"):
        shutil.copy2(pki / name, files / name)
    tls = tls_of(files)
    (files / "feed.key").unlink()
    with three_nodes(pki) as nodes, publisher_of(tmp_path, pki, nodes, tls=tls) as publisher:
        refuse(nodes, None)
        number = published(publisher)
        with pytest.raises(rt.CertificateError, match=r"feed\.key"):
            publisher.wait(number, timeout=WAIT_SECONDS)
        shutil.copy2(pki / "feed.key", files / "feed.key")
        wait_until_mended(publisher, number)


@pytest.mark.slow
def test_each_call_raises_fenced_after_fencing_and_published_messages_are_kept(
    tmp_path: Path, pki: Path
) -> None:
    with three_nodes(pki) as nodes:
        publisher = publisher_of(tmp_path, pki, nodes)
        number = publisher.publish(b"one")
        refuse(nodes, rt.Fenced("a newer incarnation took over"))
        with pytest.raises(rt.Fenced, match="a newer incarnation took over"):
            publisher.wait(number, timeout=WAIT_SECONDS)
        for _ in range(2):
            with pytest.raises(rt.Fenced, match="rejects further data of this session"):
                publisher.publish(b"two")
            with pytest.raises(rt.Fenced):
                publisher.flush()
        with pytest.raises(rt.Fenced):
            publisher.close()
        with rt.LogReader(publisher.directory, position=0) as reader:
            assert [message.value for message in reader.poll()] == [b"one"]


@pytest.mark.slow
def test_refusal_by_one_node_does_not_block_replication_and_is_shown_in_status(
    tmp_path: Path, pki: Path
) -> None:
    with three_nodes(pki) as nodes:
        refuse(nodes, None)
        nodes.nodes[2].refusal = rt.CertificateError("only a publisher can push")
        with publisher_of(tmp_path, pki, nodes) as publisher:
            for _ in range(20):
                publisher.wait(publisher.publish(b"one"), timeout=WAIT_SECONDS)
            until(lambda: publisher.status().state == "replicating")
            until(lambda: nodes.nodes[2].endpoint in reasons(publisher.status().endpoints))
            assert publisher.status().error is None


@pytest.mark.slow
def test_error_handler_can_close_publisher(tmp_path: Path, pki: Path) -> None:
    closed: queue.SimpleQueue[object] = queue.SimpleQueue()

    def close(error: rt.RtError) -> None:
        try:
            publisher.close()
        except rt.RtError as raised:
            closed.put((type(error), type(raised)))

    with three_nodes(pki) as nodes:
        publisher = publisher_of(tmp_path, pki, nodes, on_error=close)
        publisher.publish(b"one")
        refuse(nodes, rt.CertificateError("only a publisher can push"))
        assert closed.get(timeout=WAIT_SECONDS) == (rt.CertificateError, rt.CertificateError)
        with pytest.raises((rt.Closed, rt.CertificateError)):
            publisher.publish(b"two")


@pytest.mark.slow
def test_unreachable_nodes_are_named_in_status_timeout_and_one_log_line(
    tmp_path: Path, pki: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoints = endpoints_without_nodes()
    publisher = rt.Publisher(tmp_path, "s", publisher_id="feed", endpoints=endpoints, tls=tls_of(pki))
    number = publisher.publish(bytes(1000))
    publisher.flush()
    while publisher.status().state != "waiting":
        with pytest.raises(rt.Timeout):
            publisher.wait(number, timeout=0.05)
    while not all(one.error for one in publisher.status().endpoints):
        with pytest.raises(rt.Timeout):
            publisher.wait(number, timeout=0.05)
    status = publisher.status()
    assert (status.unsent_messages, status.error) == (1, None)
    assert status.unsent_bytes >= 1000
    assert all("connection refused" in str(one.error) for one in status.endpoints)
    with pytest.raises(rt.Timeout) as late:
        publisher.wait(number, timeout=0)
    assert all(f"{endpoint}: connection refused" in str(late.value) for endpoint in endpoints)
    seen = status.since_ns
    for _ in range(10):
        with pytest.raises(rt.Timeout):
            publisher.wait(number, timeout=0.2)
    assert publisher.status().since_ns == seen
    publisher.close(timeout=0)
    (line,) = (line for line in caplog.messages if "push_" in line and publisher.directory in line)
    assert "push_waits" in line
    assert all(f"{endpoint}: connection refused" in line for endpoint in endpoints)


def test_exception_in_with_block_limits_close_wait_to_2_seconds_and_is_not_replaced(
    tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def linger(_: object, run: int, number: int, seconds: float, *others: object) -> rt.RtError:
        assert (run, number, len(others)) == (0, 0, 2)
        waited.append(seconds)
        return rt.CertificateError("only a publisher can push")

    monkeypatch.setattr(WaitHandle, "linger", linger)
    for error in (KeyboardInterrupt, AssertionError):
        with (
            pytest.raises(error),
            rt.Publisher(
                tmp_path / error.__name__,
                "s",
                publisher_id="feed",
                endpoints=endpoints_without_nodes(),
                tls=tls_of(pki),
            ) as publisher,
        ):
            publisher.publish(b"one")
            raise error
    assert waited == [publishing.INTERRUPTED_SECONDS] * 2 == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rejection", [rt.BadContents("the batch cannot be decoded"), rt.ProtocolViolation("not that chunk")]
)
def test_bytes_rejected_by_every_node_are_one_problem_until_accepted(
    tmp_path: Path, pki: Path, rejection: rt.RtError
) -> None:
    told: queue.SimpleQueue[rt.RtError] = queue.SimpleQueue()
    with three_nodes(pki) as nodes:
        publisher = publisher_of(tmp_path, pki, nodes, on_error=told.put)
        number = publisher.publish(b"one")
        for node in nodes.nodes:
            node.rejection = rejection
        refuse(nodes, None)
        with pytest.raises(type(rejection), match=rejection.what):
            publisher.wait(number, timeout=WAIT_SECONDS)
        hellos = sum(len(node.hellos) for node in nodes.nodes)
        until(
            lambda: sum(len(node.hellos) for node in nodes.nodes) > hellos + 20
        )  # The push tries again and again.
        assert publisher.status().state == "blocked"
        for node in nodes.nodes:
            node.rejection = None
        wait_until_mended(publisher, number)
        publisher.close()
    assert told.get().what == rejection.what
    assert told.empty()


PROGRAM = """
import sys, time, rt
root, ca, cert, key, *endpoints = sys.argv[1:]
with rt.Publisher(
    root, "s", publisher_id="feed", endpoints=endpoints, tls=rt.TLS(ca, cert, key)
) as publisher:
    publisher.publish_many([bytes(100)] * 7)
    print("published", flush=True)
    while True:  # Not `signal.pause`: it would not see a signal that came just before.
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_ctrl_c_logs_unsent_messages_and_hand_off_to_push_process(tmp_path: Path, pki: Path) -> None:
    files = [pki / name for name in ("ca.crt", "feed.crt", "feed.key")]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path, *files, *endpoints_without_nodes()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "published\n"
        process.send_signal(signal.SIGINT)
        try:
            _, text = process.communicate(timeout=WAIT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    (line,) = (line for line in text.splitlines() if "handed_to_push_process" in line)
    assert "session=feed unsent_messages=7 unsent_bytes=" in line
    assert "The push process sends it; if that is stopped, the next publisher" in line
    (session,) = (tmp_path / "s" / "sessions").iterdir()
    with rt.LogReader(session, position=0) as reader:
        assert len(reader.poll()) == 7


# Without nodes


def test_publisher_stays_open_after_close_with_invalid_timeout(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        for wrong in (float("nan"), "1"):
            with pytest.raises(rt.InvalidOption, match="not a duration"):
                publisher.close(wrong)
        assert publisher.publish(b"one") == 0
        publisher.close(None)


def test_status_of_publisher_without_endpoints_is_local(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish(b"one")
        status = publisher.status()
        assert (status.state, status.endpoints, status.error) == ("local", (), None)
        assert (status.unsent_messages, status.progress) == (1, publisher.progress)
    closed = publisher.status()
    assert closed.state == "closed"
    assert closed.since_ns >= status.since_ns


@pytest.mark.parametrize(
    ("connected", "failed", "error", "state"),
    [
        (0, 0, None, "connecting"),
        (0, 1, None, "waiting"),
        (1, 2, None, "waiting"),
        (2, 1, None, "replicating"),
        (3, 0, None, "replicating"),
        (0, 3, rt.CertificateError("refused"), "blocked"),
    ],
)
def test_state_is_derived_from_endpoint_connections_and_error(
    connected: int, failed: int, error: rt.RtError | None, state: str
) -> None:
    endpoints = [EndpointStatus(f"n{index}:1", is_connected=True) for index in range(connected)]
    endpoints += [
        EndpointStatus(f"m{index}:1", is_connected=False, error=rt.RtError("x")) for index in range(failed)
    ]
    endpoints += [EndpointStatus(f"l{index}:1", is_connected=False) for index in range(3 - len(endpoints))]
    assert state_of(error, tuple(endpoints)) == state


@pytest.mark.parametrize(("members", "state"), [(0, "waiting"), (5, "waiting"), (3, "replicating")])
def test_state_is_replicating_if_majority_of_members_is_connected(members: int, state: str) -> None:
    endpoints = [EndpointStatus(f"n{index}:1", is_connected=True) for index in range(2)]
    endpoints += [
        EndpointStatus(f"m{index}:1", is_connected=False, error=rt.RtError("x")) for index in range(2)
    ]
    assert state_of(None, tuple(endpoints), members) == state


def test_unsent_messages_are_counted_across_runs_and_segments() -> None:
    segments = [
        SegmentExtent(SegmentId(0, 0), 0, 10, 1000),
        SegmentExtent(SegmentId(0, 1), 10, 20, 1000),
        SegmentExtent(SegmentId(1, 0), 20, 20, 64),
        SegmentExtent(SegmentId(1, 1), 20, 30, 500),
    ]
    assert above(segments, Level(0, 0)) == (30, 2500)
    assert above(segments, Level(0, 15)) == (15, 1000)
    assert above(segments, Level(1, 20)) == (10, 500)
    assert above(segments, Level(1, 29)) == (1, 50)
    assert above(segments, Level(1, 99)) == (0, 0)
    assert above(segments, Level(2, 0)) == (0, 0)


def test_problem_sets_unraised_error_before_error_becomes_visible() -> None:
    """Without the lock, `status` reads the error, and `publish` reads the error to raise."""
    seen = []

    class Watched(ReplicationProblem):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "error" and value is not None:
                seen.append(self.unraised)

    problem = Watched("/session", None)
    problem.record(rt.CertificateError("refused"))
    assert seen == [problem.error]
    assert problem.error is not None


def test_problem_resolved_before_next_call_is_not_raised() -> None:
    problem = ReplicationProblem("/session", None)
    problem.record(rt.CertificateError("refused"))
    problem.record(None)
    problem.raise_once()
    problem.raise_always()


def test_different_problem_is_raised_while_first_one_persists() -> None:
    problem = ReplicationProblem("/session", None)
    problem.record(rt.CertificateError("refused"))
    with pytest.raises(rt.CertificateError):
        problem.raise_once()
    problem.record(rt.CertificateError("refused", where="another node"))
    problem.raise_once()
    problem.record(rt.Fenced("taken over"))
    for _ in range(2):
        with pytest.raises(rt.Fenced, match="not accepted any more"):
            problem.raise_once()
    problem.record(None)
    with pytest.raises(rt.Fenced):
        problem.raise_always()
