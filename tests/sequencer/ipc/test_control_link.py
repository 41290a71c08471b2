"""The control process's end of the Unix socket to the data process: never blocks, newest peer counts."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes_bench import wait_until
from watch_loop import WatchLoop

from rt.errors import StorageError
from sequencer.ipc import server as link_module
from sequencer.ipc.frames import HEADER, FrameDecoder, frame
from sequencer.ipc.server import ControlServer


class Bench:
    def __init__(self, path: str) -> None:
        self.path = path
        self.came: list[bytes] = []
        self.link = ControlServer(path, self.came.append)
        self.loop = WatchLoop()
        self.loop.call(lambda: self.link.start(self.loop.watch))

    def send(self, content: bytes) -> None:
        self.loop.call(lambda: self.link.send(content))

    def close(self) -> None:
        try:
            self.loop.call(self.link.close)
        finally:
            self.loop.stop()

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """A connection that the link has taken."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(60)
            peer.connect(self.path)
            count = len(self.came)
            peer.sendall(frame(b"hello"))
            wait_until(lambda: len(self.came) > count)
            yield peer


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(str(tmp_path / "control"))
    yield bench
    bench.close()


def read(peer: socket.socket, count: int) -> list[bytes]:
    unframer, found = FrameDecoder(), list[bytes]()
    while len(found) < count:
        data = peer.recv(1 << 16)
        assert data, f"the link ended after {len(found)} of {count}"
        found += unframer.feed(data)
    return found


def test_messages_arrive_in_order(bench):
    with bench.connected() as peer:
        for n in range(200):
            bench.send(b"%d" % n)
        assert read(peer, 200) == [b"%d" % n for n in range(200)]


def test_slow_reader_receives_all_messages_without_blocking_sender(bench):
    messages = [bytes([n]) * (1 << 20) for n in range(32)]  # More than any socket buffer.
    with bench.connected() as peer:
        for message in messages:
            bench.send(message)
        assert read(peer, 32) == messages


def test_stalled_reader_is_dropped_and_next_connection_receives_only_new_messages(bench, monkeypatch, caplog):
    monkeypatch.setattr(link_module, "UNSENT_BYTES_MAX", 1 << 20)
    with bench.connected() as still:
        wait_until(lambda: bench.send(b"x" * (1 << 20)) or "data_process_not_reading" in caplog.text)
        wait_until(lambda: bench.link._peer is None)
        with bench.connected() as fresh:
            bench.send(b"new")
            assert read(fresh, 1) == [b"new"]
        assert still.fileno() >= 0


def test_newest_connection_replaces_older_one(bench):
    with bench.connected() as older, bench.connected() as newer:
        bench.send(b"for the newer")
        assert read(newer, 1) == [b"for the newer"]
        assert older.recv(100) == b""


def test_message_sent_without_connection_is_dropped(bench):
    bench.send(b"lost")
    with bench.connected() as peer:
        bench.send(b"found")
        assert read(peer, 1) == [b"found"]


def test_invalid_frame_ends_connection_but_not_link(bench):
    with bench.connected() as peer:
        peer.sendall(HEADER.pack(0xFFFF_FFFF))
        assert peer.recv(100) == b""
    with bench.connected() as peer:
        bench.send(b"on")
        assert read(peer, 1) == [b"on"]


class Failing:
    """A socket whose named method raises an error, a number of times."""

    def __init__(self, sock: socket.socket, name: str, error: OSError, times: int) -> None:
        self._sock, self._name, self._error, self._times = sock, name, error, times
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._name else getattr(self._sock, name)

    def _fail(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return getattr(self._sock, self._name)(*arguments)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_connections_are_accepted_later_without_busy_loop_if_descriptors_run_out(bench, number):
    error = OSError(number, os.strerror(number))
    listener = bench.link._listener = Failing(bench.link._listener, "accept", error, times=1000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(60)
        peer.connect(bench.path)
        wait_until(lambda: listener.calls > 0)
        for _ in range(20):  # Each call is one iteration of the loop.
            bench.send(b"to nobody")
        assert listener.calls == 1
        bench.loop.call(bench.link.accept_again)
        wait_until(lambda: listener.calls > 1)
        listener._times = 0
        peer.sendall(frame(b"hello"))
        bench.loop.call(bench.link.accept_again)
        wait_until(lambda: bench.came == [b"hello"])
        bench.send(b"on")
        assert read(peer, 1) == [b"on"]


def test_directory_at_socket_path_raises_storage_error_with_path_and_advice(tmp_path):
    (tmp_path / "control").mkdir()
    with pytest.raises(StorageError, match=r"cannot be used.*/control\): got EISDIR.* move away"):
        ControlServer(str(tmp_path / "control"), print)


def test_read_round_handles_limited_number_of_messages(tmp_path):
    path, came, watched = str(tmp_path / "flooded"), list[bytes](), dict[int, Callable[[int], None]]()
    link = ControlServer(path, came.append)
    link.start(lambda fd, _, on_ready=print: watched.update({fd: on_ready}))
    with contextlib.closing(link), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(60)
        peer.connect(path)
        watched[link._listener.fileno()](select.EPOLLIN)
        peer.sendall(frame(b"x") * 10_000)
        read_one_round = watched[link._peer.fileno()]
        read_one_round(select.EPOLLIN)
        assert 0 < len(came) < 4_000
        while len(came) < 10_000:
            read_one_round(select.EPOLLIN)


def test_connection_ends_after_lost_message(bench):
    with bench.connected() as peer:
        error = OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        bench.link._peer = Failing(bench.link._peer, "send", error, times=1)
        bench.send(b"lost")
        bench.send(b"the next one")
        assert peer.recv(100) == b""
    with bench.connected() as peer:
        bench.send(b"on")
        assert read(peer, 1) == [b"on"]


def test_messages_sent_before_peer_closed_are_read_although_sending_to_it_fails(bench):
    with bench.connected() as peer:
        peer.sendall(b"".join(frame(b"%d" % n) for n in range(100)))
        peer.shutdown(socket.SHUT_RDWR)
        bench.send(b"nobody reads it")
    wait_until(lambda: len(bench.came) == 101)
    wait_until(lambda: bench.link._peer is None)


def test_socket_file_has_mode_0600(bench, tmp_path):
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o600
