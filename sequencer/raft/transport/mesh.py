"""The network of a Raft node: one TLS 1.3 connection with each other member, in one thread.

    send -> queued -> flush -> flushed -> kernel          kernel -> frames -> receiver.on_message
            (may depend on unsynced data)                           (only from inside poll)

Invariants:
- A peer has a certificate of this stream for a node that is a member.
- At most one connection with a peer is up. Its end is reported before the next one starts, and no message of
  an ended connection is delivered.
- Memory is bounded whatever a peer does. Only `poll` waits.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from random import Random
from typing import Any, Final

from rt.cluster_epoch import name_of
from rt.errors import Closed
from rt.net.tls import TLS
from sequencer.raft.core.ports import MessageReceiver
from sequencer.raft.model.messages import Hello, Message
from sequencer.raft.transport.codec import encode
from sequencer.raft.transport.connection import BURST_BYTES, ConnectionPhase, MeshTiming, RaftConnection
from sequencer.raft.transport.descriptor_watch import DescriptorWatch
from sequencer.raft.transport.dialer import Dialers
from sequencer.raft.transport.frames import ping
from sequencer.raft.transport.listener import RaftListener
from sequencer.raft.transport.peer_auth import (
    PeerLost,
    PeerRejected,
    RejectionCounts,
    TlsContexts,
    check_own,
    check_peer,
)

SETUPS_MAX: Final = 16
"""Accepted connections that are not up yet. Each may use memory and a handshake."""
OUTBOX_BYTES_MAX: Final = 64 << 20
DEFAULT_TIMING: Final = MeshTiming()

logger = logging.getLogger("sequencer.raft")


class TlsMesh:
    """`core.ports.Network` over TLS. The constructor binds the port; `start` listens and dials.

    `members`: `host:port` of every member, including this one. A connection is replaced when the peer's
    certificate expires, too. A peer that leaves more than `outbox_bytes_max` unread is dropped.

    `rt.CertificateError` if the certificate is not that of the node `name`; ValueError for invalid members;
    OSError if the port is not available.
    """

    refused: Counter[str]
    """Number of rejected connections by reason: busy, direction, epoch, frame, hello, identity, member, name,
    outbox, role, slow, stream, tls.
    """

    def __init__(
        self,
        *,
        name: str,
        listen: tuple[str, int],
        members: Mapping[str, str],
        tls: TLS,
        timing: MeshTiming = DEFAULT_TIMING,
        outbox_bytes_max: int = OUTBOX_BYTES_MAX,
        random: Random | None = None,
    ) -> None:
        self._identity = tls.identity
        self._members = frozenset(members)
        check_own(self._identity, name, members)
        self._timing, self._outbox_bytes_max = timing, outbox_bytes_max
        self._rejections = RejectionCounts()
        self.refused = self._rejections.counts
        random = self._random = random or Random()
        dialled = {peer: address for peer, address in members.items() if peer < name}
        self._dialers = Dialers(dialled, backoff_s=timing.backoff_s, random=random, wake=self.wake)
        self._contexts = TlsContexts(tls, reload_s=timing.reload_s)
        self._receiver: MessageReceiver | None = None
        self._connections: dict[int, RaftConnection] = {}
        self._up: dict[str, RaftConnection] = {}
        self._unflushed: set[RaftConnection] = set()
        self._undrained: set[RaftConnection] = set()
        self._encoded: tuple[Message, int, list[bytes], int] | None = None
        self._due_s = 0.0
        self._downs: deque[str] = deque()
        self._is_closed = False
        # A signal handler may call `wake` while its own thread holds the lock in `wake` or `close`.
        self._waking = threading.RLock()
        self._listener = RaftListener(listen)
        self.port = self._listener.port
        """The port in use, also if the system chose it."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self.others = DescriptorWatch(self._epoll)
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    @property
    def connected(self) -> Collection[str]:
        return frozenset(self._up)

    def start(self, receiver: MessageReceiver, hello: Hello) -> None:
        self._check_open()
        assert self._receiver is None, "started twice"
        self._receiver = receiver
        self._set_hello(hello)
        self._listener.start(self._epoll)

    def introduce(self, hello: Hello) -> None:
        """See `Network`. What was queued or in flight is lost; `poll` reports the ends."""
        if self._is_closed:
            return
        self._set_hello(hello)
        now_s = time.monotonic()
        for connection in list(self._connections.values()):
            self._drop(connection, PeerLost("new_hello"))
        self._dialers.retry_now(now_s)
        self._due_s = 0.0

    def send(self, peer: str, message: Message) -> bool:
        """See `Network`. A peer whose outbox is full is dropped; `poll` reports its end."""
        connection = self._up.get(peer)
        if connection is None:
            return False
        known, version = self._encoded, connection.version
        if known is None or known[0] is not message or known[1] != version:  # Encode once for several peers.
            buffers = encode(message, self._hello.epoch, version)
            self._encoded = known = message, version, buffers, sum(map(len, buffers))
        _, _, buffers, size = known
        if connection.unsent_bytes + size > self._outbox_bytes_max:
            self._drop(connection, PeerRejected("outbox", f"{connection.unsent_bytes} bytes are unsent"))
            return False
        connection.queue(buffers, size)
        self._unflushed.add(connection)
        return True

    def flush(self) -> None:
        """See `Network`. What the kernel does not accept now is sent in later polls."""
        if not self._unflushed:
            return
        self._encoded = None
        now_s = time.monotonic()
        unflushed, self._unflushed = self._unflushed, set()
        for connection in unflushed:
            if connection.flush():
                self._write(connection, now_s)

    def poll(self, timeout_s: float) -> None:
        """See `Network`; may return early. Raises only what the receiver raises."""
        self._check_open()
        assert self._receiver is not None, "not started"
        if self._downs:
            timeout_s = 0.0
            self._report_downs()
            if self._is_closed:
                return
        events = self._epoll.poll(self._wait_s(timeout_s))
        now_s = time.monotonic()
        self._receiver.on_awake()
        # Before any callback: a new connection may get the descriptor of a closed one.
        ready = dict.fromkeys(self._undrained)
        calls: list[Callable[[], None]] = []
        for fd, event in events:
            connection = self._connections.get(fd)
            if connection is not None:
                ready[connection] = None
            elif fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd in self.others:
                calls.append(partial(self.others[fd], event))
            else:
                calls.append(partial(self._accept, now_s))
        for call in calls:
            call()
        for connection in ready:
            self._serve(connection, now_s)
        if (now_s >= self._due_s or self._dialers.is_resolved) and not self._is_closed:
            self._run_timers(now_s)
            self._due_s = self._find_due_s()
        if self._downs:
            self._report_downs()

    def wake(self) -> None:
        """See `Network`. Does nothing after `close`."""
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """See `Network`. Nothing more is reported. A running `poll` returns after its callback."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._connections.values():
            connection.close()
        self.others.close()
        for kept in (self._connections, self._up, self._unflushed, self._undrained, self._downs):
            kept.clear()
        self._listener.close()
        self._epoll.close()
        with self._waking:
            fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)
        self._contexts.close()

    # Connections

    def _accept(self, now_s: float) -> None:
        for sock, address in self._listener.accept(now_s):
            self._make_room()
            self._add(sock, address, None, now_s)
        self._due_s = 0.0

    def _make_room(self) -> None:
        """Limit the connections that are not up: the host with most of them loses its oldest one.

        So a host that only holds connections does not keep others out.
        """
        others = self._connections.values()
        waiting = [other for other in others if other.phase is not ConnectionPhase.UP and not other.dialled]
        if len(waiting) >= SETUPS_MAX:
            counts = Counter(other.host for other in waiting)
            oldest = max(waiting, key=lambda other: (counts[other.host], -other.born_s))
            self._drop(oldest, PeerRejected("busy", f"{SETUPS_MAX} are not up yet"))

    def _add(self, sock: socket.socket, address: tuple[Any, ...], dialled: str | None, now_s: float) -> None:
        host, port = address[:2]
        connection = RaftConnection(
            sock, address=f"{host}:{port}", dialled=dialled, now_s=now_s, silence_s=self._timing.silence_s
        )
        connection.polled = select.EPOLLIN if dialled is None else select.EPOLLOUT
        self._connections[connection.fd] = connection
        self._due_s = 0.0
        self._epoll.register(connection.fd, connection.polled)
        if dialled is None:
            try:
                connection.start_tls(self._contexts.loaded.server)
            except PeerLost as lost:
                self._drop(connection, lost)

    def _serve(self, connection: RaftConnection, now_s: float) -> None:
        """Advance a connection, and deliver its messages, at most a burst of them."""
        self._undrained.discard(connection)
        burst = BURST_BYTES
        while connection.phase is not ConnectionPhase.CLOSED:
            messages = self._received(connection, now_s)
            if connection.phase is ConnectionPhase.HELLO and connection.hello is not None:
                self._on_established(connection, connection.hello, now_s)
            if messages:
                self._deliver(connection, messages)
            burst -= connection.capacity_bytes
            if connection.is_drained:
                break
            if burst <= 0:
                self._undrained.add(connection)
                break
        if connection.polled != select.EPOLLIN or connection.wants_write:
            self._write(connection, now_s)

    def _received(self, connection: RaftConnection, now_s: float) -> list[Message]:
        try:
            if connection.phase is ConnectionPhase.UP:
                return connection.receive(now_s)
            return self._advance(connection, now_s)
        except PeerLost as lost:
            self._drop(connection, lost)
            return []

    def _deliver(self, connection: RaftConnection, messages: list[Message]) -> None:
        assert self._receiver is not None
        on_message, peer = self._receiver.on_message, connection.peer
        for message in messages:
            if connection.phase is ConnectionPhase.CLOSED:  # A callback may have closed it.
                return
            on_message(peer, message)

    def _advance(self, connection: RaftConnection, now_s: float) -> list[Message]:
        phase = connection.phase
        if phase is ConnectionPhase.CONNECTING:
            connection.connected()
            connection.start_tls(self._contexts.loaded.client)
        if phase in {ConnectionPhase.CONNECTING, ConnectionPhase.HANDSHAKE}:
            identity = connection.handshake()
            if identity is None:
                return []
            check_peer(identity, own=self._identity, members=self._members, dialled=connection.dialled)
            connection.send_hello(identity.name, self._hello_frame)
        return connection.receive(now_s)

    def _on_established(self, connection: RaftConnection, hello: Hello, now_s: float) -> None:
        assert self._receiver is not None
        if older := self._up.get(connection.peer):
            self._drop(older, PeerLost("replaced"))
        self._report_downs()
        if connection.phase is not ConnectionPhase.CLOSED:
            expires_in_s = max(0.0, connection.expires_s - time.time())
            age_s = self._timing.age_s * self._random.uniform(0.9, 1.1)
            connection.establish(now_s, now_s + min(age_s, expires_in_s))
            self._up[connection.peer] = connection
            self._due_s = 0.0
            logger.info("peer_up peer=%s epoch=%s", connection.peer, name_of(hello.epoch))
            self._receiver.on_up(connection.peer, hello)

    def _write(self, connection: RaftConnection, now_s: float) -> None:
        if connection.phase is ConnectionPhase.CLOSED:
            return
        try:
            connection.write(now_s)
        except PeerLost as lost:
            self._drop(connection, lost)
            return
        polled = select.EPOLLIN | (select.EPOLLOUT if connection.wants_write else 0)
        if polled != connection.polled:
            connection.polled = polled
            self._due_s = 0.0
            self._epoll.modify(connection.fd, polled)

    def _drop(self, connection: RaftConnection, lost: PeerLost) -> None:
        """End a connection. If it was up, its end is reported before anything else."""
        if connection.phase is ConnectionPhase.CLOSED:
            return
        is_up, peer, now_s = connection.phase is ConnectionPhase.UP, connection.peer, time.monotonic()
        self._due_s = 0.0
        del self._connections[connection.fd]
        self._unflushed.discard(connection)
        self._undrained.discard(connection)
        self._epoll.unregister(connection.fd)
        connection.close()
        if is_up:
            del self._up[peer]
            self._downs.append(peer)
            logger.info("peer_down peer=%s reason=%s detail=%r", peer, lost.reason, str(lost.detail)[:300])
        if isinstance(lost, PeerRejected):
            self._rejections.record(lost, connection.address, now_s)
        if connection.dialled is not None:
            if is_up:
                self._dialers.on_ended(peer, now_s, now_s - connection.up_s)
            else:
                self._dialers.on_failed(peer, now_s, lost.detail)

    def _report_downs(self) -> None:
        assert self._receiver is not None
        while self._downs:
            self._receiver.on_down(self._downs.popleft())

    # Time

    def _wait_s(self, timeout_s: float) -> float:
        if timeout_s <= 0.0 or self._undrained:
            return 0.0
        if self._due_s == 0.0:
            self._due_s = self._find_due_s()
        return max(0.0, min(timeout_s, self._due_s - time.monotonic()))

    def _find_due_s(self) -> float:
        """When `_run_timers` has something to do at the earliest, so that not every round checks.

        Valid until `_due_s` is set to 0 because something earlier was added. Messages only make timers later.
        """
        due_s = min(self._contexts.due_s, self._listener.due_s, self._dialers.due_s)
        return min(due_s, min(map(self._timing.due_of, self._connections.values()), default=due_s))

    def _run_timers(self, now_s: float) -> None:
        """Do what is due at `now_s`, the time of the events: what arrived while the process slept counts as
        heard.
        """
        for connection in list(self._connections.values()):
            if now_s >= self._timing.due_of(connection):
                self._time_out(connection, now_s)
        for peer, sock, address in self._dialers.connect(now_s):
            self._add(sock, address, peer, now_s)
        self._listener.resume(now_s)
        self._contexts.refresh(now_s)

    def _time_out(self, connection: RaftConnection, now_s: float) -> None:
        try:
            self._timing.check(connection, now_s, is_read=connection not in self._undrained)
        except PeerLost as lost:
            self._drop(connection, lost)
            return
        if not connection.stuck_bytes:
            connection.send_now(ping(self._hello.epoch, connection.version))
            self._write(connection, now_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the network was closed")

    def _set_hello(self, hello: Hello) -> None:
        self._hello, self._encoded = hello, None
        self._hello_frame = b"".join(encode(hello, hello.epoch))
