"""The network of a Raft node: one TLS 1.3 connection with each other member, in one thread.

    send -> queued -> flush -> flushed -> kernel          kernel -> frames -> receiver.on_message
            (may depend on unsynced data)                           (only from inside poll)

Invariants:
- A peer has a certificate of this stream for a node that is a member.
- At most one connection with a peer is up. Its end is reported before the next one starts, and no message of
  an ended connection is delivered.
- Memory is bounded, even if a peer is hostile. Only `poll` waits.
"""

from __future__ import annotations

import logging
import select
import socket
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
from sequencer.raft.transport.codec import FrameEncoder
from sequencer.raft.transport.connection import (
    BURST_BYTES,
    ConnectionPhase,
    MeshTiming,
    RaftConnection,
    one_too_many,
)
from sequencer.raft.transport.descriptor_watch import DescriptorWatch, Waker
from sequencer.raft.transport.dialer import Dialers
from sequencer.raft.transport.frames import ping
from sequencer.raft.transport.listener import RaftListener
from sequencer.raft.transport.peer_auth import (
    MeshMembers,
    PeerLost,
    PeerRejected,
    RejectionCounts,
    TlsContexts,
    check_own,
)

SETUPS_MAX: Final = 16
"""Accepted connections that are not up yet. Each may use memory and a handshake."""
OUTBOX_BYTES_MAX: Final = 64 << 20
DEFAULT_TIMING: Final = MeshTiming()

logger = logging.getLogger("sequencer.raft")


class TlsMesh:
    """`core.ports.Network` over TLS. The constructor binds the port; `start` listens and dials.

    `members`: `host:port` of every member, including this one, until `set_members`. A connection is replaced
    when the peer's certificate expires, too. A peer that leaves more than `outbox_bytes_max` unread is
    dropped.

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
        self._members = MeshMembers(name, members)
        check_own(self._identity, name, members)
        self._timing, self._outbox_bytes_max = timing, outbox_bytes_max
        self._rejections = RejectionCounts()
        self.refused = self._rejections.counts
        self._random = random or Random()
        self._contexts = TlsContexts(tls, reload_s=timing.reload_s)
        self._receiver: MessageReceiver | None = None
        self._connections: dict[int, RaftConnection] = {}
        self._up: dict[str, RaftConnection] = {}
        self._unflushed: set[RaftConnection] = set()
        self._undrained: set[RaftConnection] = set()
        self._downs: deque[str] = deque()
        self._due_s, self._is_closed = 0.0, False
        self._listener = RaftListener(listen)
        self.port = self._listener.port
        """The port in use, also if the system chose it."""
        self._waker = Waker()
        self.wake = self._waker.wake
        """See `Network`. Does nothing after `close`."""
        dials = self._members.dialled
        self._dialers = Dialers(dials, backoff_s=timing.backoff_s, random=self._random, wake=self.wake)
        self._epoll = select.epoll()
        self.others = DescriptorWatch(self._epoll)
        self._epoll.register(self._waker.fd, select.EPOLLIN)

    @property
    def connected(self) -> Collection[str]:
        return frozenset(self._up)

    def start(self, receiver: MessageReceiver, hello: Hello) -> None:
        self._check_open()
        assert self._receiver is None, "started twice"
        self._receiver = receiver
        self._frames = FrameEncoder(hello)
        self._listener.start(self._epoll)

    def introduce(self, hello: Hello) -> None:
        """See `Network`. What was queued or in flight is lost; `poll` reports the ends."""
        if self._is_closed:
            return
        self._frames = FrameEncoder(hello)
        for connection in list(self._connections.values()):
            self._drop(connection, PeerLost("new_hello"))
        self._dialers.retry_now(time.monotonic())
        self._due_s = 0.0

    def set_members(self, members: Mapping[str, str], notice: Message | None) -> None:
        """See `Network`. `poll` reports the ends of connections."""
        self._members.notice = notice
        if self._is_closed or members == self._members.addresses:
            return
        ended = self._members.replace(members)
        self._update_dialers()
        for connection in list(self._connections.values()):
            if connection.peer in ended or (connection.is_refused and connection.peer in members):
                self._drop(connection, PeerLost("members_changed"))

    def dial_all(self, *, is_wanted: bool) -> None:
        """See `Network`."""
        self._members.is_dialling_all = is_wanted
        self._update_dialers()

    def _update_dialers(self) -> None:
        self._due_s = 0.0
        self._dialers.update(self._members.dialled)

    def send(self, peer: str, message: Message) -> bool:
        """See `Network`. A peer whose outbox is full is dropped; `poll` reports its end."""
        connection = self._up.get(peer)
        if connection is None:
            return False
        buffers, size = self._frames.encode(message, connection.version)
        if connection.unsent_bytes + size > self._outbox_bytes_max:
            self._drop(connection, PeerRejected("outbox", f"{connection.unsent_bytes} bytes are unsent"))
            return False
        connection.queue(buffers, size)
        self._unflushed.add(connection)
        return True

    def flush(self) -> None:
        """See `Network`. Bytes that the kernel does not accept now are sent in later polls."""
        if not self._unflushed:
            return
        self._frames.forget()
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
        # This is done before any callback, because a new connection may get the descriptor of a closed one.
        ready = dict.fromkeys(self._undrained)
        calls: list[Callable[[], None]] = []
        for fd, event in events:
            connection = self._connections.get(fd)
            if connection is not None:
                ready[connection] = None
            elif fd == self._waker.fd:
                self._waker.on_ready()
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
        self._waker.close()
        self._contexts.close()

    # Connections

    def _accept(self, now_s: float) -> None:
        for sock, address in self._listener.accept(now_s):
            if (oldest := one_too_many(self._connections.values(), SETUPS_MAX)) is not None:
                self._drop(oldest, PeerRejected("busy", f"{SETUPS_MAX} are not up yet"))
            self._add(sock, address, None, now_s)
        self._due_s = 0.0

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
            if connection.is_greeted and connection.hello is not None:
                self._on_established(connection, connection.hello, now_s)
            if messages and not connection.is_refused:
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
            refused = self._members.check(identity, self._identity, dialled=connection.dialled)
            connection.send_hello(identity.name, self._frames.hello)
            if refused is not None:
                self._rejections.record(refused, connection.address, now_s)
                connection.is_refused = True
                connection.send_now(self._members.notice_frame(self._frames.epoch))
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
        """The earliest time at which `_run_timers` has something to do, so that not every round checks.

        Valid until `_due_s` is set to 0 because an earlier timer was added. Messages only make timers later.
        """
        due_s = min(self._contexts.due_s, self._listener.due_s, self._dialers.due_s)
        return min(due_s, min(map(self._timing.due_of, self._connections.values()), default=due_s))

    def _run_timers(self, now_s: float) -> None:
        """Do what is due at `now_s`, the time of the events: what came while the process slept is heard."""
        for connection in list(self._connections.values()):
            if now_s >= self._timing.due_of(connection):
                self._time_out(connection, now_s)
        for peer, sock, address in self._dialers.connect(now_s, self._up):
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
            connection.send_now(ping(self._frames.epoch, connection.version))
            self._write(connection, now_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the network was closed")
