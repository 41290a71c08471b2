"""One TLS connection with a member: handshake, authentication, frames in, frames out.

    CONNECTING -> HANDSHAKE -> HELLO -> UP           a dialled one; an accepted one starts in HANDSHAKE
                  TLS        hellos   messages

Invariants:
- Nothing that a peer sends is read before its certificate is checked, and no message before its hello.
- No byte that was queued after the last `flush` is sent.
- No call waits. Errors of the peer raise `PeerRejected`, other ends of the connection `PeerLost`.
"""

from __future__ import annotations

import math
import socket
import ssl
import termios
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from fcntl import ioctl
from typing import Final

from msgspec import Struct

from rt.errors import CertificateError, FormatError
from rt.net.identity import Identity, peer_of
from sequencer.raft.model.messages import Hello, Message
from sequencer.raft.transport.codec import decode, version_with
from sequencer.raft.transport.frames import FRAME_HEADER_BYTES, HELLO_VERSION, FrameKind, decode_header
from sequencer.raft.transport.peer_auth import PeerLost, PeerRejected

PIECE_BYTES: Final = 256 << 10
"""Size of one call of send: many TLS records, so that calls cost little."""
BURST_BYTES: Final = 4 << 20
"""After this many bytes in one direction another connection is served."""
_BUFFER_BYTES: Final = 256 << 10
_GREETING_BYTES: Final = 1 << 10
"""The buffer before the peer's hello: larger than a hello."""

_NOTHING: Final = bytes(4)
"""How the kernel reports that no bytes are available."""

_AGAIN = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError, InterruptedError)


class ConnectionPhase(Enum):
    CONNECTING = auto()
    HANDSHAKE = auto()
    HELLO = auto()
    UP = auto()
    CLOSED = auto()


class RaftConnection:
    """A connection that is being established, or up. One thread uses it; the caller polls `fd`.

    The kernel ends the connection if the peer does not acknowledge bytes for `silence_s`.
    """

    hello: Hello | None = None
    """The peer's hello, once received."""
    version = HELLO_VERSION
    """The version of the protocol that both sides use after their hellos."""
    expires_s = math.inf
    """When the peer's certificate expires, seconds since the Unix epoch."""
    is_refused = False
    """The peer is no member: it gets a hello and a notice, and nothing that it sends is delivered."""
    until_s = math.inf
    """When the connection must be replaced, by the caller's clock."""
    is_drained = True
    """Whether the last `receive` read everything. If not, call it again: polling may not show the rest."""

    def __init__(
        self, sock: socket.socket, *, address: str, dialled: str | None, now_s: float, silence_s: float
    ) -> None:
        sock.setblocking(False)
        with suppress(OSError):  # It may be closed already; reading will show it.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s))
        self._sock = sock
        self.fd = sock.fileno()
        self.address = address
        """The peer's address, for logs."""
        self.host = address.rpartition(":")[0]
        """`address` without the port."""
        self.dialled = dialled
        self.peer = dialled or ""
        """The member at the other end; verified from phase `HELLO` on."""
        self.phase = ConnectionPhase.CONNECTING if dialled is not None else ConnectionPhase.HANDSHAKE
        self.polled = 0
        """The events for which the caller polls `fd`."""
        self.born_s = self.received_s = self.sent_s = self.up_s = now_s
        self._wants_write = dialled is not None
        self._queued: list[bytes] = []
        self._queued_bytes = 0
        self._flushed: deque[bytes] = deque()
        self.stuck_bytes = 0
        """Flushed bytes that the kernel has not accepted."""
        self._piece = memoryview(b"")
        self._buffer = memoryview(bytearray(_GREETING_BYTES))
        self._filled = 0
        self._ended: PeerLost | None = None

    @property
    def unsent_bytes(self) -> int:
        """Queued and flushed bytes that the kernel has not accepted."""
        return self._queued_bytes + self.stuck_bytes

    @property
    def capacity_bytes(self) -> int:
        """How many bytes one `receive` reads at most."""
        return len(self._buffer)

    @property
    def wants_write(self) -> bool:
        """Whether to poll for writing, too."""
        return self._wants_write or self.stuck_bytes > 0

    @property
    def is_greeted(self) -> bool:
        """Whether the hello of a member has arrived, and the connection may be up."""
        return self.phase is ConnectionPhase.HELLO and self.hello is not None and not self.is_refused

    def close(self) -> None:
        """Close the socket. Unsent bytes are lost."""
        self.phase = ConnectionPhase.CLOSED
        self._sock.close()

    def connected(self) -> None:
        """Record that the connect has ended. Raises `PeerLost` if it failed."""
        if error := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PeerLost("connect", OSError(error, "cannot connect"))
        self.phase = ConnectionPhase.HANDSHAKE

    def start_tls(self, context: ssl.SSLContext) -> None:
        """Start TLS. If this side dialled, the certificate must name the member."""
        with _socket_errors("tls"):
            self._sock = context.wrap_socket(
                self._sock,
                server_side=self.dialled is None,
                server_hostname=self.dialled,
                do_handshake_on_connect=False,
            )

    def handshake(self) -> Identity | None:
        """Continue the handshake. Returns the peer's identity when it is done."""
        assert isinstance(self._sock, ssl.SSLSocket)
        try:
            with _socket_errors("tls"):
                self._sock.do_handshake()
                certificate = self._sock.getpeercert(binary_form=True)
        except _AGAIN as again:
            self._wants_write = isinstance(again, ssl.SSLWantWriteError)
            return None
        self._wants_write = False
        try:
            identity, self.expires_s = peer_of(certificate or b"", where="the peer's certificate")
        except CertificateError as error:
            raise PeerRejected("identity", error) from error
        return identity

    def send_hello(self, peer: str, hello: bytes) -> None:
        self.peer = peer
        self.phase = ConnectionPhase.HELLO
        self.send_now(hello)

    def establish(self, now_s: float, until_s: float) -> None:
        self.phase = ConnectionPhase.UP
        self.up_s = self.received_s = now_s
        self.until_s = until_s

    def queue(self, buffers: list[bytes], size: int) -> None:
        """Queue a frame of `size` bytes. It is sent after the next `flush`."""
        self._queued += buffers
        self._queued_bytes += size

    def send_now(self, frame: bytes) -> None:
        """Queue a frame that depends on nothing. It may be sent before queued frames."""
        self._flushed.append(frame)
        self.stuck_bytes += len(frame)

    def flush(self) -> bool:
        """Allow `write` to send the queued frames. Return False if there are none."""
        if not self._queued:
            return False
        self._flushed.extend(self._queued)
        self.stuck_bytes += self._queued_bytes
        self._queued.clear()
        self._queued_bytes = 0
        return True

    def write(self, now_s: float) -> None:
        """Send flushed bytes until the kernel accepts no more, at most a burst."""
        burst = BURST_BYTES
        while burst > 0 and self.stuck_bytes:
            if not self._piece:
                self._piece = memoryview(self._next_piece())
            # After "try again" OpenSSL needs the same bytes again: `_piece` still holds them.
            try:
                sent = self._sock.send(self._piece[:PIECE_BYTES])
            except _AGAIN:
                return
            except (OSError, ValueError) as error:
                raise _lost("tls", error) from error
            self._piece = self._piece[sent:]
            self.stuck_bytes -= sent
            self.sent_s = now_s
            burst -= sent

    def receive(self, now_s: float) -> list[Message]:
        """The messages that have arrived, at most a buffer full. Sets `hello` when it arrives.

        Messages before an invalid frame may be lost with it.
        """
        if self._fill():
            self.received_s = now_s
        try:
            return self._decode_messages()
        except FormatError as error:
            raise PeerRejected("frame", error) from error

    def _next_piece(self) -> bytes:
        """Join flushed buffers up to `PIECE_BYTES`. A larger buffer is sent alone, without a copy."""
        flushed = self._flushed
        if self.stuck_bytes <= PIECE_BYTES:
            piece = b"".join(flushed)
            flushed.clear()
        else:
            parts = [flushed.popleft()]
            room = PIECE_BYTES - len(parts[0])
            while flushed and len(flushed[0]) <= room:
                room -= len(flushed[0])
                parts.append(flushed.popleft())
            piece = b"".join(parts)
        return piece

    def _fill(self) -> int:
        """Read until nothing is left or the buffer is full. Returns the number of bytes.

        A read returns at most one TLS record. If the record leaves room in the buffer, TLS holds back no
        bytes. Then the kernel is asked whether it has more, which is cheaper than a failing read. If the
        connection ended after some bytes, a later call raises the error.
        """
        if self._ended is not None:
            raise self._ended
        start = self._filled
        self.is_drained = False
        try:
            while room := len(self._buffer) - self._filled:
                got = self._sock.recv_into(self._buffer[self._filled :], room)
                if not got:
                    self._ended = PeerLost("ended", "closed by the peer")
                    break
                self._filled += got
                if got < room and ioctl(self.fd, termios.FIONREAD, _NOTHING) == _NOTHING:
                    self.is_drained = True
                    break
        except _AGAIN:
            self.is_drained = True
        except (OSError, ValueError) as error:
            self._ended = _lost("tls", error)
        if self._ended is not None and self._filled == start:
            raise self._ended
        return self._filled - start

    def _decode_messages(self) -> list[Message]:
        messages: list[Message] = []
        buffer, start, filled, wanted = self._buffer, 0, self._filled, 0
        while filled - start >= FRAME_HEADER_BYTES:
            length, kind, epoch = decode_header(buffer, start, self.version)
            if (kind == FrameKind.HELLO) != (self.hello is None):
                raise PeerRejected(
                    "hello", f"a frame of kind {kind} {'after' if self.hello else 'before'} its hello"
                )
            if self.hello is not None and epoch != self.hello.epoch:
                raise PeerRejected("epoch", f"{epoch} in a frame, {self.hello.epoch} in its hello")
            end = start + FRAME_HEADER_BYTES + length
            if end > filled:
                wanted = end - start
                break
            if kind != FrameKind.PING:
                body = buffer[start + FRAME_HEADER_BYTES : end]
                message = decode(kind, body)
                if not isinstance(message, Hello):
                    messages.append(message)
                elif message.epoch == epoch:
                    self.hello, self.version = message, version_with(body, self.peer)
                    wanted = _BUFFER_BYTES
                else:
                    raise PeerRejected("epoch", f"{epoch} in the header of its hello, {message.epoch} in it")
            start = end
        self._compact(start, wanted)
        return messages

    def _compact(self, start: int, wanted: int) -> None:
        """Move the bytes from `start` on to the front of a buffer of at least `wanted` bytes."""
        rest = self._filled - start
        source = self._buffer[start : self._filled]
        if wanted > len(self._buffer):
            self._buffer = memoryview(bytearray(max(wanted, _BUFFER_BYTES)))
        if rest and (start or self._buffer.obj is not source.obj):
            self._buffer[:rest] = source
        self._filled = rest


class MeshTiming(Struct, frozen=True):
    """Intervals in seconds."""

    ping_s: float = 1.0
    """Each side sends at least this often."""
    silence_s: float = 4.0
    """A peer is down if it is silent for this time."""
    setup_s: float = 5.0
    """A connection must be up within this time."""
    age_s: float = 3600.0
    """A connection is replaced after about this time, so that both sides are checked again."""
    backoff_s: tuple[float, float] = (0.05, 1.0)
    """The shortest and the longest pause after a failed attempt to connect."""
    reload_s: float = 5.0
    """How often the certificate files are checked for changes."""

    def due_of(self, connection: RaftConnection) -> float:
        """When to call `check`, or to send a ping."""
        if connection.phase is not ConnectionPhase.UP:
            return connection.born_s + self.setup_s
        silent_s = min(connection.received_s + self.silence_s, connection.until_s)
        return silent_s if connection.stuck_bytes else min(silent_s, connection.sent_s + self.ping_s)

    def check(self, connection: RaftConnection, now_s: float, *, is_read: bool) -> None:
        """Raise `PeerLost` if the connection, which is due, must end.

        `is_read`: whether all bytes that have arrived were read.
        """
        if connection.is_refused:
            raise PeerLost("refused")
        if connection.phase is not ConnectionPhase.UP:
            raise PeerRejected("slow", f"not up within {self.setup_s} s")
        if now_s >= connection.until_s:
            raise PeerLost("aged", "its certificates must be checked again")
        if now_s >= connection.received_s + self.silence_s and is_read:
            raise PeerLost("silent", f"for {self.silence_s} s")


def one_too_many(connections: Iterable[RaftConnection], most: int) -> RaftConnection | None:
    """If at least `most` accepted connections are not up, return the oldest of them from the host with the
    most of them.

    So a host that only holds connections does not keep other hosts out.
    """
    waiting = [one for one in connections if one.phase is not ConnectionPhase.UP and not one.dialled]
    if len(waiting) < most:
        return None
    counts = Counter(one.host for one in waiting)
    return max(waiting, key=lambda one: (counts[one.host], -one.born_s))


@contextmanager
def _socket_errors(reason: str) -> Iterator[None]:
    """Convert errors of a socket to `PeerLost`, or to `PeerRejected` if the peer violates TLS."""
    try:
        yield
    except _AGAIN:
        raise
    except (OSError, ValueError) as error:
        raise _lost(reason, error) from error


def _lost(reason: str, error: Exception) -> PeerLost:
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return PeerRejected(reason, error)
    return PeerLost("ended", error)
