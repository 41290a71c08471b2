"""Reports of the supervisor on processes that start, serve, hang and end."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from service_manager import ServiceManager

from rt.sidecar.systemd_notify import ServiceNotifier
from sequencer.ipc.silence import HUNG_S
from sequencer.localcluster.loopback import free_port
from sequencer.node.health_port import CONNECTIONS_MAX, REQUEST_BYTES_MAX, REQUEST_S, open_health_port
from sequencer.node.heartbeats import START_S_MAX, Heartbeats
from sequencer.node.node_watch import LOG_S, NodeWatch

CHILDREN = ("control", "data")
GET = b"GET %s HTTP/1.1\r\nHost: n1:8080\r\n\r\n"


class Clocked:
    """A watch with a clock that advances in steps of a second."""

    def __init__(self, watch: NodeWatch) -> None:
        self.watch, self.now_s = watch, 1000.0
        for number, child in enumerate(CHILDREN, 101):
            watch.started(child, number)
        watch.tick(self.now_s)

    def passes(self, seconds: float, *alive: str) -> None:
        """Let the seconds pass. Only these children send a heartbeat every second."""
        for _ in range(int(seconds)):
            self.now_s += 1
            for child in alive:
                self.watch.heard(child)
            self.watch.tick(self.now_s)


# Heartbeats


def test_process_is_starting_until_first_heartbeat_and_hung_after_heartbeats_stop() -> None:
    beats = Heartbeats(CHILDREN)
    beats.update(0.0)
    for number, child in enumerate(CHILDREN, 101):
        beats.started(child, number)
    assert beats.obstacles == [
        "control-starting: the control process (pid 101) has been starting for 0 s.",
        "data-starting: the data process (pid 102) has been starting for 0 s.",
    ]
    for child in CHILDREN:
        beats.record(child)
    assert (beats.obstacles, beats.hung) == ([], [])
    beats.update(0.0)
    for now_s in range(1, int(HUNG_S) + 1):
        assert beats.hung == []
        beats.record("control")
        beats.update(float(now_s))
    (data,) = beats.hung
    (text,) = beats.obstacles
    assert (data.name, data.pid, data.silent_s) == ("data", 102, HUNG_S)
    assert text.startswith("data-hung: the data process (pid 102) has not answered for 5 s. ")
    assert "`grep State /proc/102/status`" in text
    assert "`kill -CONT 102`" in text
    beats.record("data")
    assert beats.hung == []


def test_ended_process_is_down_and_next_process_is_starting() -> None:
    beats = Heartbeats(CHILDREN)
    for child in CHILDREN:
        beats.started(child, 101)
        beats.record(child)
    beats.ended("data")
    for now_s in range(100):
        beats.record("control")
        beats.update(float(now_s))
    assert beats.hung == []
    (text,) = beats.obstacles
    assert text.startswith("data-down: the data process does not run.")
    beats.started("data", 103)
    assert "data-starting: the data process (pid 103)" in beats.obstacles[0]


def test_starting_process_is_hung_only_after_start_limit() -> None:
    beats = Heartbeats(("data",))
    beats.started("data", 101)
    beats.update(0.0)
    for now_s in range(1, int(START_S_MAX)):
        beats.update(float(now_s))
    assert beats.hung == []
    assert beats.children["data"].silent_s == 0, "no metric says that it hangs"
    beats.update(START_S_MAX)
    assert [child.name for child in beats.hung] == ["data"]


def test_pause_of_supervisor_is_not_counted_as_hung_process() -> None:
    beats = Heartbeats(CHILDREN)
    for child in CHILDREN:
        beats.started(child, 101)
        beats.record(child)
    beats.update(0.0)
    beats.update(3600.0)
    assert beats.hung == []


# The log


def test_hung_process_is_logged_immediately_then_at_low_rate_and_again_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Clocked(NodeWatch(CHILDREN))
    node.passes(2, *CHILDREN)
    node.passes(LOG_S - 2, "control")

    def logged() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.name.endswith("node_watch")]
        return [text.partition(" hint=")[0] for text in texts]

    assert logged() == ["child_hung child=data pid=102 silent_s=5"]
    node.passes(10, "control")
    assert logged()[1:] == ["child_hung child=data pid=102 silent_s=65"]
    node.passes(1, *CHILDREN)
    assert logged()[2:] == ["child_answers child=data silent_s=68"]
    node.passes(10, "control")
    assert len(logged()) == 3, "one that hangs and answers in turn does not fill the log"


# systemd


def test_systemd_gets_ready_when_both_processes_serve_and_watchdog_until_one_hangs() -> None:
    with ServiceManager() as systemd:
        variables = {"NOTIFY_SOCKET": systemd.name, "WATCHDOG_USEC": "4000000"}
        node = Clocked(NodeWatch(CHILDREN, notifier=ServiceNotifier(variables)))
        node.passes(3, "control")
        assert "READY=1" not in systemd.read()
        assert systemd.received.count("WATCHDOG=1") == 4, "starting is no hang"
        assert systemd.received[-2].startswith("STATUS=data-starting: ")

        node.passes(3, *CHILDREN)
        assert systemd.read().count("READY=1") == 1
        assert "STATUS=serving" in systemd.received
        systemd.received.clear()
        node.passes(HUNG_S + 3, "data")
        assert systemd.read().count("WATCHDOG=1") == HUNG_S - 1
        assert "STATUS=control-hung: the control process (pid 101)" in systemd.received[-1]

        systemd.received.clear()
        node.passes(1, *CHILDREN)
        assert systemd.read() == ["STATUS=serving", "WATCHDOG=1"]
        for _ in range(2):
            node.watch.stopping()
            node.passes(1, *CHILDREN)
        assert systemd.read()[2:] == ["STOPPING=1", "STATUS=the node is stopping"]


# The health port


@contextmanager
def probed() -> Iterator[tuple[Clocked, int]]:
    listening = open_health_port("127.0.0.1", free_port())
    assert listening is not None
    port = listening.getsockname()[1]
    with closing(NodeWatch(CHILDREN, "n1", listening)) as watch:
        yield Clocked(watch), port


def answers(node: Clocked, connection: socket.socket) -> bytes:
    """Return the bytes received until the connection ends; empty if it is closed without an answer."""
    connection.setblocking(False)
    read = b""
    while True:
        poll = select.poll()
        node.watch.register(poll, node.now_s)
        poll.register(connection, select.POLLIN)
        poll.poll()
        node.watch.tick(node.now_s)
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return read
        if not data:
            return read
        read += data


def asked(node: Clocked, port: int, request: bytes) -> tuple[int, str]:
    """Send the request, and return the status and the body."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request)
        head, _, body = answers(node, connection).partition(b"\r\n\r\n")
    assert b"\r\nConnection: close" in head
    return int(head.split()[1]), body.decode()


def test_probes_of_hung_data_process_name_process_duration_and_remedy() -> None:
    with probed() as (node, port):
        node.passes(1, *CHILDREN)
        node.passes(7, "control")
        for path, name in ((b"/readiness", "ready"), (b"/liveness?x", "alive")):
            status, body = asked(node, port, GET % path)
            (text,) = json.loads(body)["obstacles"]
            assert (status, json.loads(body)[name]) == (503, False)
            assert text.startswith("data-hung: the data process (pid 102) has not answered for 7 s. ")
            assert "`kill -9 102`" in text
        status, metrics = asked(node, port, GET % b"/metrics")
        assert status == 200
        assert 'rt_member_data_silent_seconds{member="n1"} 7.000\n' in metrics
        assert "\nrt_is_ready 0\n" in metrics
        assert "rt_control_silent_seconds 0.000\n" in metrics


def test_probe_connections_are_left_to_data_process_until_it_hangs() -> None:
    with probed() as (node, port), socket.create_connection(("127.0.0.1", port)) as connection:
        node.passes(1, *CHILDREN)
        connection.sendall(GET % b"/liveness")
        node.passes(2, *CHILDREN)
        node.passes(HUNG_S - 1, "control")
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
        node.passes(1, "control")
        assert answers(node, connection).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    ("state", "text"),
    [("starting", "data-starting: "), ("down", "data-down: "), ("stopping", "the node is ")],
)
def test_probe_reports_node_that_is_starting_down_or_stopping(state: str, text: str) -> None:
    with probed() as (node, port):
        node.passes(1, "control")
        if state == "down":
            node.watch.ended("data")
        elif state == "stopping":
            node.watch.stopping()
        status, body = asked(node, port, GET % b"/readiness")
        assert status == 503
        assert json.loads(body)["obstacles"][0].startswith(text)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /status HTTP/1.1\r\n\r\n", 404),
        (b"POST /liveness HTTP/1.1\r\n\r\n", 405),
        (b"GET /liveness\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\xff \xfe HTTP/1.1\r\n\r\n", 405),
        (b"HEAD /liveness HTTP/1.0\r\n\r\n", 503),
    ],
)
def test_health_port_answers_other_requests_with_error_status(request_: bytes, status: int) -> None:
    with probed() as (node, port):
        found, body = asked(node, port, request_)
        assert found == status
        assert bool(body) == (not request_.startswith(b"HEAD"))


def test_split_request_is_answered_and_large_or_late_request_is_closed() -> None:
    with probed() as (node, port):
        where = ("127.0.0.1", port)
        with socket.create_connection(where) as connection:
            connection.sendall(GET[:9])
            node.passes(1, "control")
            connection.sendall((GET % b"/liveness")[9:])
        with socket.create_connection(where) as connection:
            for byte in (b"GET /liveness HTTP/1.1\r\nHost", b": n1\r\n", b"\r\n"):
                connection.sendall(byte)
                node.passes(1, "control")
            assert answers(node, connection).startswith(b"HTTP/1.1 503 ")
        with socket.create_connection(where) as connection:
            connection.sendall(b"x" * (REQUEST_BYTES_MAX + 1))
            assert answers(node, connection) == b""
        with socket.create_connection(where) as connection:
            node.passes(REQUEST_S + 3, "control")
            assert answers(node, connection) == b""


def test_probe_is_answered_despite_many_silent_connections() -> None:
    with probed() as (node, port):
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * CONNECTIONS_MAX)]
        try:
            node.passes(4, "control")
            assert asked(node, port, GET % b"/liveness")[0] == 503
        finally:
            for connection in silent:
                connection.close()


def test_health_port_in_use_or_0_is_not_opened() -> None:
    assert open_health_port("127.0.0.1", 0) is None
    with closing(open_health_port("127.0.0.1", port := free_port())) as taken:
        assert taken is not None
        assert open_health_port("127.0.0.1", port, seconds_max=0.0) is None
