"""One TLS connection with a member: who is let in, frames in, frames out.

    CONNECTING -> SHAKING -> GREETING -> UP          a dialled one; an accepted one begins SHAKING
                  TLS        hellos      messages

The law: nothing that a peer sends is looked at before its certificate is, no message before its hello, and
no byte leaves that was queued after the last `flush`. No call waits; what a peer does wrong is
`PeerRejected`, what merely happens to a connection is `PeerLost`, and no other exception comes from here.
"""

from __future__ import annotations

import math
import socket
import ssl
import termios
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from fcntl import ioctl
from typing import Final

from cryptography import x509

from rt.errors import CertificateError, FormatError
from rt.net.identity import Identity, identity_of, reading
from sequencer.raft.model.messages import Hello, Message
from sequencer.raft.transport.codec import (
    FRAME_HEADER_BYTES,
    FrameKind,
    decode,
    decode_header,
)
from sequencer.raft.transport.peer_auth import PeerLost, PeerRejected

PIECE_BYTES: Final = 256 << 10
"""What one call of send is given: many TLS records, so that their bytes and not the calls cost the time."""
BURST_BYTES: Final = 4 << 20
"""After so many bytes in one direction it is another connection's turn."""
_BUFFER_BYTES: Final = 256 << 10
_GREETING_BYTES: Final = 1 << 10
"""The buffer of a peer that has not introduced itself: more than a hello."""

_NOTHING: Final = bytes(4)
"""How the kernel says that no bytes are there."""

_AGAIN = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError, InterruptedError)


class ConnectionPhase(Enum):
    """How far a connection has come."""

    CONNECTING = auto()
    SHAKING = auto()
    GREETING = auto()
    UP = auto()
    CLOSED = auto()


class RaftConnection:
    """A connection on its way up, or up. One thread uses it; `fd` is polled by the caller."""

    hello: Hello | None = None
    """How the peer introduced itself, once it has."""
    expires_s = math.inf
    """When the peer's certificate ends, seconds since the Unix epoch, once it was shown."""
    until_s = math.inf
    """When the connection is to be made anew, by the caller's clock."""
    is_drained = True
    """Whether the last `receive` took all there was; else call it again: polling need not show the rest."""

    def __init__(self, sock: socket.socket, *, address: str, dialled: str | None, now_s: float) -> None:
        self._sock = sock
        self.fd = sock.fileno()
        self.address = address
        """Where the peer is, for logs."""
        self.host = address.rpartition(":")[0]
        """The same without its port."""
        self.dialled = dialled
        self.peer = dialled or ""
        """The member at the other end: for certain from `GREETING` on."""
        self.step = ConnectionPhase.CONNECTING if dialled is not None else ConnectionPhase.SHAKING
        self.polled = 0
        """The caller's note of the events it polls `fd` for."""
        self.born_s = self.received_s = self.sent_s = self.up_s = now_s
        self._wants_write = dialled is not None
        self._queued: list[bytes] = []
        self._queued_bytes = 0
        self._flushed: deque[bytes] = deque()
        self.stuck_bytes = 0
        """Bytes flushed that the kernel has not taken."""
        self._piece = memoryview(b"")
        self._buffer = memoryview(bytearray(_GREETING_BYTES))
        self._filled = 0
        self._ended: PeerLost | None = None

    @property
    def unsent_bytes(self) -> int:
        """Bytes queued or flushed that the kernel has not taken."""
        return self._queued_bytes + self.stuck_bytes

    @property
    def capacity_bytes(self) -> int:
        """The most that one `receive` takes."""
        return len(self._buffer)

    @property
    def wants_write(self) -> bool:
        """Whether to poll for room to write as well."""
        return self._wants_write or self.stuck_bytes > 0

    def close(self) -> None:
        """Close the socket. What was not sent is lost."""
        self.step = ConnectionPhase.CLOSED
        self._sock.close()

    def connected(self) -> None:
        """The connect has ended: `PeerLost` if in failure."""
        if error := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PeerLost("connect", OSError(error, "cannot connect"))
        self.step = ConnectionPhase.SHAKING

    def secure(self, context: ssl.SSLContext) -> None:
        """Begin TLS, as the client if this was dialled: the certificate must then carry the member's name."""
        with _losing("tls"):
            self._sock = context.wrap_socket(
                self._sock,
                server_side=self.dialled is None,
                server_hostname=self.dialled,
                do_handshake_on_connect=False,
            )

    def shake(self) -> Identity | None:
        """Go on with the handshake; the peer's identity when it is done."""
        assert isinstance(self._sock, ssl.SSLSocket)
        try:
            with _losing("tls"):
                self._sock.do_handshake()
                certificate = self._sock.getpeercert(binary_form=True)
        except _AGAIN as again:
            self._wants_write = isinstance(again, ssl.SSLWantWriteError)
            return None
        self._wants_write = False
        try:
            with reading("the peer's certificate", "the certificate is malformed"):
                found = x509.load_der_x509_certificate(certificate or b"")
                self.expires_s = found.not_valid_after_utc.timestamp()
                return identity_of(found)
        except CertificateError as error:
            raise PeerRejected("identity", error) from error

    def greet(self, peer: str, hello: bytes) -> None:
        """The peer is the member `peer`: send it our hello."""
        self.peer = peer
        self.step = ConnectionPhase.GREETING
        self.push(hello)

    def rise(self, now_s: float, until_s: float) -> None:
        """Both hellos are exchanged: messages may be queued."""
        self.step = ConnectionPhase.UP
        self.up_s = self.received_s = now_s
        self.until_s = until_s

    def queue(self, buffers: list[bytes], size: int) -> None:
        """Take a frame of `size` bytes; it leaves some time after the next `flush`."""
        self._queued += buffers
        self._queued_bytes += size

    def push(self, frame: bytes) -> None:
        """Take a frame that depends on nothing: it may leave before what is queued."""
        self._flushed.append(frame)
        self.stuck_bytes += len(frame)

    def flush(self) -> bool:
        """Let what is queued leave with the next calls of `write`; False if there was nothing."""
        if not self._queued:
            return False
        self._flushed.extend(self._queued)
        self.stuck_bytes += self._queued_bytes
        self._queued.clear()
        self._queued_bytes = 0
        return True

    def write(self, now_s: float) -> None:
        """Send what was flushed until the kernel takes no more, or for a burst."""
        burst = BURST_BYTES
        while burst > 0 and self.stuck_bytes:
            if not self._piece:
                self._piece = memoryview(self._next_piece())
            # After "try again" OpenSSL wants the same bytes again, which these then are.
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
        """The messages that have arrived, a buffer full at most; `hello` is set once it is among them.

        What stands before a bad frame may be lost with it.
        """
        if self._fill():
            self.received_s = now_s
        try:
            return self._take_messages()
        except FormatError as error:
            raise PeerRejected("frame", error) from error

    def _next_piece(self) -> bytes:
        """Join what was flushed, up to `PIECE_BYTES`; a larger buffer goes alone and uncopied."""
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
        """Read until nothing is there or the buffer is full; how many bytes.

        A read gives no more than one TLS record. If it leaves room, TLS holds nothing back: then the kernel
        is asked whether it has more, which costs less than to be refused a read. An end behind some bytes is
        raised by a later call, so that they are taken first.
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

    def _take_messages(self) -> list[Message]:
        messages: list[Message] = []
        buffer, start, filled, wanted = self._buffer, 0, self._filled, 0
        while filled - start >= FRAME_HEADER_BYTES:
            length, kind, epoch = decode_header(buffer, start)
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
                message = decode(kind, buffer[start + FRAME_HEADER_BYTES : end])
                if not isinstance(message, Hello):
                    messages.append(message)
                elif message.epoch == epoch:
                    self.hello = message
                    wanted = _BUFFER_BYTES
                else:
                    raise PeerRejected("epoch", f"{epoch} in the header of its hello, {message.epoch} in it")
            start = end
        self._keep(start, wanted)
        return messages

    def _keep(self, start: int, wanted: int) -> None:
        """Keep the bytes from `start` on, in front of a buffer of at least `wanted` bytes."""
        rest = self._filled - start
        source = self._buffer[start : self._filled]
        if wanted > len(self._buffer):
            self._buffer = memoryview(bytearray(max(wanted, _BUFFER_BYTES)))
        if rest and (start or self._buffer.obj is not source.obj):
            self._buffer[:rest] = source
        self._filled = rest


@contextmanager
def _losing(reason: str) -> Iterator[None]:
    """Turn what a socket says into `PeerLost` or, if the peer speaks TLS wrongly or not at all,
    `PeerRejected`.
    """
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
