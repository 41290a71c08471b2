"""The running Raft node: stopping, failing to open, a failing disk, hostile connections."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from disks import MemoryDisk
from raft_bench import (
    DIRECTORY,
    ListMachine,
    disk_id,
)
from raft_members import HOST

from rt.errors import Closed, Corrupt, StorageFailed
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import (
    NO_ID,
    NOWHERE,
    DiskClaim,
    Hello,
    Message,
)
from sequencer.raft.raft import Raft
from sequencer.raft.transport.connection import MeshTiming
from sequencer.raft.transport.mesh import SETUPS_MAX, TlsMesh


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TLS]:
    ca = tmp_path_factory.mktemp("pki")
    init_ca(ca)
    return {name: TLS(*issue(ca, Identity("s", "node", name), loopback=True)) for name in ("n1", "n2")}


def wait_for(condition: Callable[[], object], said: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.002)


class Gated(ListMachine):
    """A state machine that waits for permission to apply."""

    def __init__(self, may_apply: threading.Event) -> None:
        super().__init__()
        self.may_apply = may_apply

    def apply(self, index: int, command: bytes) -> None:
        assert self.may_apply.wait(120)
        super().apply(index, command)


class Running:
    """A real single-node cluster on a disk in memory. `failures` contains each failure and the state of the
    node at that moment.
    """

    def __init__(self, tls: dict[str, TLS], disk: Any = None, **settings: Any) -> None:
        self.failures: list[tuple[type[BaseException], str, bool, str | None, int]] = []
        self.may_apply = threading.Event()
        self.may_apply.set()
        self.disk = MemoryDisk() if disk is None else disk
        self.tls, self.settings = tls, {"members": {"n1": f"{HOST}:1"}, "segment_bytes": 4096, **settings}
        self.raft = self.open()

    def open(self) -> Raft:
        config = RaftConfig(name="n1", directory=DIRECTORY, stream="s", bootstrap=True, **self.settings)
        more = {"tls": self.tls["n1"], "listen": (HOST, 0), "on_failure": self.on_failure}
        return Raft(config, Gated(self.may_apply), disk=self.disk, **more)

    def on_failure(self, error: BaseException) -> None:
        raft = self.raft
        state = raft.status().role, raft.is_leader, raft.leader, raft._mesh._listener._sock.fileno()
        self.failures.append((type(error), *state))


def test_stop_on_full_disk_is_not_a_failure(tls: dict[str, TLS]) -> None:
    """V8: it counted as a failure, which ends the process with status 70."""
    running = Running(tls)
    running.raft.propose(b"one").result(120)
    running.disk.capacity_bytes = 0
    future = running.raft.propose(bytes(100_000))
    wait_for(lambda: running.raft.status().role == "stalled")
    assert not running.raft.is_leader
    running.raft.stop()
    assert running.failures == []
    assert running.raft.status().role == "stopped"
    assert isinstance(future.exception(0), Closed)


def _descriptors() -> Counter[str]:
    """Return the number of open file descriptors of each kind."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]] += 1
    return found


@pytest.mark.usefixtures("no_pushes")
def test_failed_open_leaves_no_threads_or_file_descriptors(tls: dict[str, TLS], tmp_path: Path) -> None:
    """V9: each failed open left a thread, an event, an epoll and a bound port."""
    running = Running(tls)
    running.raft.propose(b"one").result(120)
    running.raft.stop()
    path = f"{DIRECTORY}/identity"
    file = running.disk.open(path, write=True)
    [byte] = file.pread(1, 40)
    file.pwritev([bytes([byte ^ 1])], 40)
    threads, descriptors = set(threading.enumerate()), _descriptors()
    for _ in range(3):
        with pytest.raises(Corrupt):
            running.open()
        assert set(threading.enumerate()) <= threads  # Threads of earlier tests may end meanwhile.
        assert _descriptors() <= descriptors
    file.pwritev([bytes([byte])], 40)
    file.close()
    running.raft = running.open()
    running.raft.propose(b"two").result(120)
    running.raft.stop()
    assert running.failures == []


class Dying(MemoryDisk):
    """A disk that hangs in the sync of a snapshot while `is_hanging`, and fails the sync of the log once it
    `is_failing`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.released = threading.Event(), threading.Event()
        self.is_hanging = self.is_failing = False
        self.renamed: list[str] = []

    def create(self, path: str) -> Any:
        return _DyingFile(super().create(path), path, self)

    def open(self, path: str, *, write: bool = False) -> Any:
        return _DyingFile(super().open(path, write=write), path, self)

    def rename(self, source: str, target: str) -> None:
        if self.is_failing and "snapshot" in target:
            self.renamed.append(target)
        super().rename(source, target)


class _DyingFile:
    def __init__(self, file: Any, path: str, disk: Dying) -> None:
        self._file, self._path, self._disk = file, path, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        if self._disk.is_hanging and "snapshot" in self._path:
            self._disk.hangs.set()
            assert self._disk.released.wait(120)
        if self._disk.is_failing and "/log." in self._path:
            raise OSError(errno.EIO, "Input/output error")
        self._file.sync()


def test_node_stops_on_disk_failure_while_snapshot_sync_hangs(tls: dict[str, TLS]) -> None:
    """V10: the node listened and led until a snapshot was synced, although its disk was failing.

    X2: that snapshot then got its name after the failed sync.
    """
    disk = Dying()
    running = Running(tls, disk, snapshot_ms=50)
    try:
        running.raft.propose(b"one").result(120)
        disk.is_hanging = True
        running.raft.propose(b"two").result(120)
        assert disk.hangs.wait(120)
        disk.is_failing = True
        future = running.raft.propose(b"three")
        wait_for(lambda: running.failures)
        assert not disk.released.is_set()
        assert running.failures == [(StorageFailed, "stopped", False, None, -1)]
        assert isinstance(future.exception(0), Closed)
    finally:
        disk.released.set()
        running.raft.stop()
    assert disk.renamed == []


def test_stop_from_callback_leaves_nothing_in_flight(tls: dict[str, TLS]) -> None:
    """V29: the thread tried to wait for itself, and abandoned commands counted as in flight indefinitely."""
    running = Running(tls)
    raised: list[BaseException] = []
    later: list[Future[int]] = []

    def stop(_future: Future[int]) -> None:
        later.append(running.raft.propose(b"never"))
        try:
            running.raft.stop()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    running.may_apply.clear()
    running.raft.propose(b"one").add_done_callback(stop)
    running.may_apply.set()
    running.raft._thread.join(120)
    assert (raised, running.failures) == ([], [])
    assert isinstance(later[0].exception(0), Closed)
    assert (running.raft.status().role, running.raft.status().in_flight) == ("stopped", 0)
    running.raft.stop()


@pytest.mark.usefixtures("no_pushes")
def test_stop_leaves_no_thread_except_pending_name_lookup(
    tls: dict[str, TLS], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V23: the documentation promised that no thread is left, but a name lookup cannot be interrupted."""
    before, answer, asked = set(threading.enumerate()), threading.Event(), threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: Any, *more: Any, **options: Any) -> Any:
        if host == "slow.example" and not options.get("flags", 0) & socket.AI_NUMERICHOST:
            asked.set()
            assert answer.wait(120)
            raise socket.gaierror(socket.EAI_NONAME, "nobody")
        return look_up(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    members = {"n0": "slow.example:1", "n1": f"{HOST}:1", "n2": f"{HOST}:2"}
    running = Running(tls, members=members)
    assert asked.wait(120)
    running.raft.stop()
    left = set(threading.enumerate()) - before
    answer.set()
    assert [thread.name for thread in left] == ["look-up slow.example"]
    for thread in left:
        thread.join(120)
    assert running.failures == []


class Ups:
    """A receiver that records which peers are up."""

    def __init__(self) -> None:
        self.up: set[str] = set()

    def on_awake(self) -> None:
        pass

    def on_up(self, peer: str, _hello: Hello) -> None:
        self.up.add(peer)

    def on_message(self, _peer: str, _message: Message) -> None:
        pass

    def on_down(self, peer: str) -> None:
        self.up.discard(peer)


class Silent:
    """A host that keeps many connections open, sends nothing, and replaces connections that end."""

    def __init__(self, port: int, host: str, count: int) -> None:
        self.port, self.host, self.count = port, host, count
        self.made = 0
        self.sockets: list[socket.socket] = []

    def hold(self) -> None:
        kept = []
        for sock in self.sockets:
            if self._is_open(sock):
                kept.append(sock)
            else:
                sock.close()
        self.sockets = kept
        while len(self.sockets) < self.count:
            sock = socket.create_connection(("127.0.0.1", self.port), source_address=(self.host, 0))
            sock.setblocking(False)
            self.sockets.append(sock)
            self.made += 1

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()

    @staticmethod
    def _is_open(sock: socket.socket) -> bool:
        try:
            return sock.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def test_member_connects_while_another_host_fills_all_connection_setups(tls: dict[str, TLS]) -> None:
    """V14: when the maximum of connections was being set up, every further connection was rejected, also
    those of members.
    """
    with contextlib.ExitStack() as stack:
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        listener.close()
        members = {"n1": f"{HOST}:{port}", "n2": f"{HOST}:1"}
        meshes = {
            name: TlsMesh(
                name=name,
                listen=(HOST, port if name == "n1" else 0),
                members=members,
                tls=tls[name],
                timing=MeshTiming(setup_s=1000.0, backoff_s=(0.01, 0.05)),  # No setup times out.
            )
            for name in members
        }
        inboxes = {name: Ups() for name in meshes}
        for mesh in meshes.values():
            stack.callback(mesh.close)
        meshes["n1"].start(inboxes["n1"], Hello(NO_ID, 0, DiskClaim(disk_id("n1"), NOWHERE)))
        silent = Silent(port, "127.0.0.2", 40)
        stack.callback(silent.close)
        while meshes["n1"].refused["busy"] < 40 - SETUPS_MAX:
            silent.hold()
            meshes["n1"].poll(0.001)
        meshes["n2"].start(inboxes["n2"], Hello(NO_ID, 0, DiskClaim(disk_id("n2"), NOWHERE)))

        def is_up() -> bool:
            silent.hold()
            for mesh in meshes.values():
                mesh.poll(0.001)
            assert len(meshes["n1"]._connections) - len(meshes["n1"]._up) <= SETUPS_MAX
            return bool(inboxes["n1"].up and inboxes["n2"].up)

        wait_for(is_up, lambda: dict(meshes["n1"].refused))
        assert silent.made > 40
