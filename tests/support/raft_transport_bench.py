"""Meshes of the Raft transport on the loopback."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rt.endpoints import parse_endpoint
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from sequencer.localcluster.loopback import free_port
from sequencer.raft.model.messages import (
    NOWHERE,
    Admit,
    AppendEntries,
    AppendEntriesReply,
    DiskClaim,
    Forward,
    Hello,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)
from sequencer.raft.transport.codec import encode
from sequencer.raft.transport.connection import MeshTiming
from sequencer.raft.transport.mesh import TlsMesh

HOST = "127.0.0.1"
CLAIM = DiskClaim(b"D" * 16, LogIndex(3, 2))
HELLO = Hello(b"C" * 16, 7, CLAIM)
MESSAGES: list[Message] = [
    RequestVote(5, LogIndex(9, 4), CLAIM, pre=True),
    RequestVoteReply(5, granted=True, claim=CLAIM, pre=False),
    AppendEntries(5, LogIndex(9, 4), 8, 7, 1, (RaftEntry(b"ten", 10, 4), RaftEntry(b"", 11, 5))),
    AppendEntriesReply(5, matched=True, prev=9, index=11, claim=CLAIM),
    InstallSnapshot(5, LogIndex(9, 4), 100, b"S" * 32, 90, b"the end..."),
    InstallSnapshotReply(5, NOWHERE, 120, 100, installed=False, claim=CLAIM),
    Forward(b"a command"),
    Admit(b"a state"),
    TimeoutNow(5),
]


class Inbox:
    """A receiver that records events, and calls `act` at each one."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.act: Callable[[tuple[object, ...]], None] = lambda event: None

    def on_awake(self) -> None:
        pass

    def on_up(self, peer: str, hello: Hello) -> None:
        self._note("up", peer, hello)

    def on_message(self, peer: str, message: Message) -> None:
        self._note("message", peer, message)

    def on_down(self, peer: str) -> None:
        self._note("down", peer)

    def _note(self, *event: object) -> None:
        self.events.append(event)
        self.act(event)

    def messages(self, peer: str) -> list[Message]:
        return [event[2] for event in self.events if event[:2] == ("message", peer)]

    def count(self, *event: object) -> int:
        return sum(noted[: len(event)] == event for noted in self.events)


class Pki:
    """A CA in its own directory. It issues certificates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        init_ca(directory)

    def tls(self, name: str, *, stream: str = "s", role: str = "node", dns: tuple[str, ...] = ()) -> TLS:
        return TLS(*issue(self.directory, Identity(stream, role, name), dns=dns, renew=True))


class Net:
    """Members with their own ports, the meshes made for them, and a loop that drives the meshes."""

    def __init__(self, tls: dict[str, TLS]) -> None:
        self.tls = tls
        self.members = {name: f"{HOST}:{free_port()}" for name in tls}
        self.inboxes: dict[TlsMesh, Inbox] = {}
        self.extra: list[Callable[[], object]] = []

    def port(self, name: str) -> int:
        return parse_endpoint(self.members[name]).port

    def mesh(
        self, name: str, *, hello: Hello = HELLO, members: dict[str, str] | None = None, **options: object
    ) -> TlsMesh:
        times = {name: options.pop(name) for name in MeshTiming.__slots__ if name in options}
        timing = MeshTiming(**{"backoff_s": (0.01, 0.05)} | times)
        options.setdefault("listen", (HOST, self.port(name)))
        options.setdefault("tls", self.tls[name])
        mesh = TlsMesh(name=name, members=members or self.members, timing=timing, **options)
        self.inboxes[mesh] = Inbox()
        mesh.start(self.inboxes[mesh], hello)
        return mesh

    def drive(self, until: Callable[[], object], *only: TlsMesh) -> None:
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline, {m: inbox.events[-3:] for m, inbox in self.inboxes.items()}
            for mesh in only or list(self.inboxes):
                mesh.poll(0.001)
            for act in self.extra:
                act()

    def pair(self, **options: object) -> tuple[TlsMesh, TlsMesh, Inbox, Inbox]:
        first, second = self.mesh("n1", **options), self.mesh("n2", **options)
        self.drive(lambda: first.connected and second.connected)
        return first, second, self.inboxes[first], self.inboxes[second]

    def close(self, mesh: TlsMesh) -> None:
        del self.inboxes[mesh]
        mesh.close()


@contextlib.contextmanager
def attacker(
    port: int, context: ssl.SSLContext | None, payload: bytes = b"", host: str = "n1"
) -> Iterator[None]:
    """Connect and send in a thread, then read until the other side closes the connection."""

    def attack() -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.create_connection((HOST, port), timeout=120))
            if context is not None:
                sock = stack.enter_context(context.wrap_socket(sock, server_hostname=host))
            sock.sendall(payload)
            while sock.recv(65536):
                pass

    thread = threading.Thread(target=attack)
    thread.start()
    yield
    thread.join()


def connected(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Return a connection after its handshake. Other code must drive the other side meanwhile."""
    return context.wrap_socket(socket.create_connection((HOST, port), timeout=120), server_hostname="n1")


def frame(message: Message | Hello, epoch: int = HELLO.epoch) -> bytes:
    return b"".join(encode(message, epoch))


class Clock:
    """Replaces the module `time` for the transport. Only the test advances its monotonic clock."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def advance(self) -> None:
        self.now_s += 0.005
