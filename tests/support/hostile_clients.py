"""Clients that attack the memory of a node. Each attack is a process with its own certificates.

`python hostile_clients.py ATTACK SPEC`, where SPEC is the JSON of a `Target`. It writes a line to its output
once the attack is running, and continues until its input ends. After a rejection, a request is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import ssl
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

import rt
from replicator.protocol.codec import PULL_METHOD, PUSH_METHOD, encode_pull_request, encode_push_request
from replicator.protocol.handshake import PullHello, PullMerged, PushHello
from replicator.protocol.messages import Chunk, LogOffset, Run
from replicator.pull.node_call import pull_channel
from rt.errors import RtError
from rt.log.format.batch import BATCH_HEADER_BYTES, BATCH_MAGIC, CODEC_ZSTD, HEADER, BatchDraft, encode_batch
from rt.log.format.checksum import batch_seed, crc32c
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    encode_segment_header,
)
from rt.net.grpc_channel import open_channel
from rt.net.lease_client import LEASE_SERVICE
from rt.net.rest_client import REST_METHOD
from rt.v1 import leases_pb2, rest_pb2

# isort: split
import grpc.aio

STREAM: Final = "s"
LEASE_GROUP: Final = "h-group"
PAUSE_S: Final = 0.2
"""The pause before a rejected request is repeated."""
TROUBLE: Final = (RtError, OSError, EOFError, ssl.SSLError, grpc.aio.AioRpcError, asyncio.InvalidStateError)


@dataclass(frozen=True)
class Target:
    """A node: its ports, and the attackers' certificates (paths of CA, certificate, key)."""

    data_port: int
    rest_port: int
    publishers: Sequence[Sequence[str]]
    subscribers: Sequence[Sequence[str]]
    operators: Sequence[Sequence[str]]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.data_port}"


def name_of(tls: rt.TLS) -> str:
    return tls.identity.name


# HTTP/2 by hand, for bytes that a gRPC client never sends


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2, RFC 9113 section 4.1."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def headers(stream: int, path: str, more: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return the headers of a gRPC request, literal and not indexed: RFC 7541 section 6.2.2."""
    fields = [
        (":method", "POST"),
        (":scheme", "https"),
        (":path", path),
        (":authority", "n1"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *more,
    ]
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    kinds = [1, *[9] * (len(pieces) - 1)]
    last = len(pieces) - 1
    return b"".join(
        frame(kind, 4 * (at == last), stream, piece)
        for at, (kind, piece) in enumerate(zip(kinds, pieces, strict=True))
    )


def _text(text: str) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size]) + text.encode()
    rest, out = size - 127, bytearray([127])
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*out, rest]) + text.encode()


@cache
def context(tls: rt.TLS, protocol: str) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.set_alpn_protocols([protocol])
    made.load_cert_chain(tls.cert, tls.key)
    return made


class RawConnection:
    """An HTTP/2 connection that respects the server's flow-control windows and ignores its replies."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._initial = self._window = 65_535
        self._windows: dict[int, int] = {}
        self._ended: set[int] = set()
        self._changed = asyncio.Event()
        self._running = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, target: Target, tls: rt.TLS) -> RawConnection:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", target.data_port, ssl=context(tls, "h2"), ssl_handshake_timeout=120
        )
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        return cls(reader, writer)

    async def begin(self, stream: int, path: str, more: Sequence[tuple[str, str]] = ()) -> None:
        self._windows[stream] = self._initial
        self._writer.write(headers(stream, path, more))
        await self._writer.drain()

    async def send(self, stream: int, data: bytes, *, piece: int = 16_384) -> bool:
        """Send frames of `piece` bytes, as far as the windows allow. Return whether all data was sent."""
        view = memoryview(data)
        while view:
            if stream in self._ended:
                return False
            size = min(self._window, self._windows[stream], len(view), 16_384)
            if size <= 0:
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 1)
                except TimeoutError:
                    return False
                continue
            part = bytes(view[:size])
            self._writer.write(
                b"".join(frame(0, 0, stream, part[at : at + piece]) for at in range(0, size, piece))
            )
            await self._writer.drain()
            self._window -= size
            self._windows[stream] -= size
            view = view[size:]
        return True

    @property
    def is_over(self) -> bool:
        return self._running.done()

    async def _read(self) -> None:
        with contextlib.suppress(*TROUBLE):
            while True:
                head = await self._reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                stream = int.from_bytes(head[5:])
                payload = await self._reader.readexactly(size)
                self._hear(kind, flags, stream, payload)
                self._changed.set()

    def _hear(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == 4 and not flags & 1:
            for at in range(0, len(payload), 6):
                key, value = struct.unpack_from(">HI", payload, at)
                if key == 4:
                    self._windows = {one: has + value - self._initial for one, has in self._windows.items()}
                    self._initial = value
            self._writer.write(frame(4, 1, 0, b""))
        elif kind == 6 and not flags & 1:
            self._writer.write(frame(6, 1, 0, payload))
        elif kind == 8:
            more = int.from_bytes(payload)
            if stream:
                self._windows[stream] = self._windows.get(stream, 0) + more
            else:
                self._window += more
        elif kind == 3 or (kind == 1 and flags & 1):
            self._ended.add(stream)

    async def close(self) -> None:
        self._running.cancel()
        self._writer.transport.abort()


# Attacks. Each is called for every certificate, and calls `begun` once it is running


Begun = Callable[[], None]
Attack = Callable[[Target, rt.TLS, Begun], Awaitable[None]]
Send = Callable[[Any, SegmentHeader], Awaitable[None]]
Fill = Callable[[RawConnection, int], Awaitable[None]]


async def again(act: Callable[[], Awaitable[None]]) -> None:
    """Call `act` repeatedly, whatever error it gets."""
    while True:
        with contextlib.suppress(*TROUBLE):
            await act()
        await asyncio.sleep(PAUSE_S)


async def _pulls(target: Target, tls: rt.TLS, begun: Begun, hello: bytes) -> None:
    """Open as many pulls as a certificate may have, and more. None of them reads."""
    async with pull_channel(target.address, tls) as channel:

        async def pull() -> None:
            call: Any = channel.get().stream_stream(PULL_METHOD)()
            try:
                await call.write(hello)
                await call.code()
            finally:
                call.cancel()

        tasks = [asyncio.create_task(again(pull)) for _ in range(24)]
        begun()
        await asyncio.gather(*tasks)


async def stalled_pulls(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Open pulls of the whole log and never read them."""
    await _pulls(target, tls, begun, encode_pull_request(PullHello(STREAM, PullMerged())))


async def filtered_pulls(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Open pulls with the largest filters and never read them."""
    draw = random.Random(name_of(tls))
    topics = tuple(draw.randbytes(29).hex() + f"{number:04}" for number in range(1023))
    await _pulls(
        target, tls, begun, encode_pull_request(PullHello(STREAM, PullMerged(topics=("t", *topics))))
    )


async def _pushes(
    target: Target,
    tls: rt.TLS,
    begun: Begun,
    send: Callable[[Any, SegmentHeader], Awaitable[None]],
    count: int,
) -> None:
    """Open `count` sessions, each with an open run and a started segment, and call `send` for each."""
    async with open_channel(target.address, tls) as channel:
        waiting = asyncio.Semaphore(4)

        async def push(number: int) -> None:
            incarnation, life = os.urandom(16), os.urandom(8)
            hello = PushHello(STREAM, f"{name_of(tls)}~{number}-{os.urandom(3).hex()}", incarnation)
            call: Any = channel.get().stream_stream(PUSH_METHOD)()
            try:
                async with waiting:
                    await call.write(encode_push_request(hello))
                    await call.read()
                    await call.write(encode_push_request(Run(0, life)))
                    await call.read()
                header = SegmentHeader(
                    LogKind.SESSION, SegmentId(0, 0), 0, 1_700_000_000 * 10**9, incarnation, life
                )
                chunk = Chunk(LogOffset(0, 0, 0), encode_segment_header(header))
                await call.write(encode_push_request(chunk))
                drained = asyncio.create_task(_drain(call))
                try:
                    await send(call, header)
                    await call.code()
                finally:
                    drained.cancel()
            finally:
                call.cancel()

        tasks = [asyncio.create_task(again(lambda number=number: push(number))) for number in range(count)]
        begun()
        await asyncio.gather(*tasks)


async def _drain(call: Any) -> None:
    with contextlib.suppress(*TROUBLE):
        while await call.read() is not grpc.aio.EOF:
            pass


async def _send(call: Any, at: int, data: bytes) -> int:
    for start in range(0, len(data), 2**20):
        piece = data[start : start + 2**20]
        await call.write(encode_push_request(Chunk(LogOffset(0, 0, at), piece)))
        at += len(piece)
    return at


async def unfinished_pushes(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Send batches of the largest size fast, and never finish them."""
    draw = random.Random(name_of(tls))

    async def send(call: Any, header: SegmentHeader) -> None:
        draft_bytes = _largest_of(header)
        at = await _send(call, SEGMENT_HEADER_BYTES, draft_bytes)
        for _ in range(draw.choice((2, 15, 60, 255))):
            at = await _send(call, at, bytes(2**20))

    await _pushes(target, tls, begun, send, 16)


def _largest_of(header: SegmentHeader) -> bytes:
    """Return the start of a batch with the largest message, valid at the first offset of a segment.

    The checksum of its columns is correct.
    """
    size = 2**28
    columns = np.array([0, size], np.int32).tobytes() + np.array([1], np.int64).tobytes()
    columns += (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"t"
    stored = columns + bytes(-len(columns) % 8)
    total = BATCH_HEADER_BYTES + len(stored) + size
    fields = [0, 0, 1, 1, 0, 1, 1, len(columns), size, len(columns), size]
    head = HEADER.pack(BATCH_MAGIC, 0, total, *fields)
    checksum = crc32c(head[8:] + stored, batch_seed(header.seed, SEGMENT_HEADER_BYTES))
    return head[:4] + checksum.to_bytes(4, "little") + head[8:] + stored


async def compressed_pushes(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Send batches with the highest compression ratio: with many messages, or with one large message."""
    draw = random.Random(name_of(tls))

    async def send(call: Any, header: SegmentHeader) -> None:
        at, first = SEGMENT_HEADER_BYTES, 0
        for _ in range(40):
            count, size = draw.choice(((1_000_000, 0), (1, 15 * 2**20), (1, 200 * 2**20)))
            data = _compressed(count, size, first, batch_seed(header.seed, at))
            at = await _send(call, at, data)
            first += count

    await _pushes(target, tls, begun, send, 8)


def _compressed(count: int, size: int, first: int, seed: int) -> bytes:
    offsets = np.zeros(count + 1, np.int32)
    offsets[-1] = size
    draft = BatchDraft(bytes(size), offsets, np.ones(count, np.int64), 1, 1, [b"t"], None)
    return b"".join(bytes(part) for part in encode_batch(draft, first=first, seed=seed, codec=CODEC_ZSTD))


async def _raw(
    target: Target, tls: rt.TLS, begun: Begun, fill: Callable[[RawConnection, int], Awaitable[None]]
) -> None:
    """Open two connections with the maximum number of streams, and call `fill` for each stream."""

    async def attack() -> None:
        connection = await RawConnection.open(target, tls)
        try:
            await asyncio.sleep(PAUSE_S)  # Wait for the server's settings.
            begun()
            for number in range(128):
                await fill(connection, 2 * number + 1)
            while not connection.is_over:
                await asyncio.sleep(PAUSE_S)
        finally:
            await connection.close()

    await asyncio.gather(*(again(attack) for _ in range(2)))


async def partial_messages(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Send all of a message except its last byte, on every stream."""
    message = b"\0" + (2**20).to_bytes(4) + bytes(2**20 - 1)

    async def fill(connection: RawConnection, stream: int) -> None:
        await connection.begin(stream, PUSH_METHOD)
        if stream < 128:  # The node accepts a limited number of hellos; other streams send none.
            hello = encode_push_request(PushHello(STREAM, f"{name_of(tls)}~{stream}", os.urandom(16)))
            await connection.send(stream, b"\0" + len(hello).to_bytes(4) + hello)
        await connection.send(stream, message)

    await _raw(target, tls, begun, fill)


async def tiny_messages(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Fill the windows with empty messages, in frames of a few bytes."""
    hello = encode_pull_request(PullHello(STREAM, PullMerged()))

    async def fill(connection: RawConnection, stream: int) -> None:
        unary = stream % 4 == 1
        await connection.begin(stream, REST_METHOD if unary else PULL_METHOD)
        if not unary:
            await connection.send(stream, b"\0" + len(hello).to_bytes(4) + hello)
        await connection.send(stream, bytes(5 * 4_000), piece=5)
        await connection.send(stream, b"\0" + (2**20).to_bytes(4) + bytes(2**13), piece=1)

    await _raw(target, tls, begun, fill)


async def large_metadata(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Make calls with metadata of the maximum size."""
    more = [(f"x-{number:02}", "v" * 900) for number in range(15)]

    async def fill(connection: RawConnection, stream: int) -> None:
        await connection.begin(stream, PUSH_METHOD, more)

    await _raw(target, tls, begun, fill)


async def idle_connections(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Open idle connections at both ports: before TLS, within its handshake, and after it."""

    async def idle(port: int, secure: ssl.SSLContext | None, said: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=secure)
        try:
            writer.write(said)
            await reader.read()
        finally:
            writer.transport.abort()

    hello = ssl.MemoryBIO()
    wrapped = context(tls, "h2").wrap_bio(ssl.MemoryBIO(), hello)
    with contextlib.suppress(ssl.SSLWantReadError):
        wrapped.do_handshake()
    begins = hello.read()
    kinds: list[tuple[int, ssl.SSLContext | None, bytes]] = []
    for port in (target.data_port, target.rest_port):
        kinds += [(port, None, b""), (port, None, begins), (port, context(tls, "h2"), b"")]
    tasks = [asyncio.create_task(again(lambda kind=kind: idle(*kind))) for kind in kinds for _ in range(60)]
    begun()
    await asyncio.gather(*tasks)


async def rest_floods(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Send bodies that are too large or never end, over HTTP and gRPC, and do not read the replies."""

    async def slow() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.rest_port, ssl=context(tls, "http/1.1"))
        try:
            writer.write(
                b"POST /configuration HTTP/1.1\r\nHost: n\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n4000\r\n" + b" " * 0x3FFF
            )
            for _ in range(30):
                await asyncio.sleep(PAUSE_S)
                writer.write(b" ")
                await writer.drain()
        finally:
            writer.transport.abort()

    async def large() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.rest_port, ssl=context(tls, "http/1.1"))
        try:
            for _ in range(200):
                writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: n\r\n\r\n" * 20)
                await writer.drain()
            writer.write(
                b"POST /configuration HTTP/1.1\r\nHost: n\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000000000\r\n\r\n"
            )
            for _ in range(1000):
                writer.write(bytes(2**20))
                await writer.drain()
        finally:
            writer.transport.abort()

    async with open_channel(target.address, tls) as channel:
        post = rest_pb2.RestRequest(
            method="POST", target="/configuration", body=b" " * (2**20)
        ).SerializeToString()
        get = rest_pb2.RestRequest(method="GET", target="/openapi.json").SerializeToString()

        async def tunnel(said: bytes) -> None:
            await channel.get().unary_unary(REST_METHOD)(said)

        acts = [*[slow] * 20, *[large] * 4, *[lambda: tunnel(post)] * 20, *[lambda: tunnel(get)] * 8]
        tasks = [asyncio.create_task(again(act)) for act in acts]
        begun()
        await asyncio.gather(*tasks)


async def many_sessions(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Open and cancel sessions, each with its own name."""

    async def send(call: Any, header: SegmentHeader) -> None:
        del header
        await asyncio.sleep(5 * PAUSE_S)
        call.cancel()

    await _pushes(target, tls, begun, send, 32)


async def large_leases(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Make lease calls with the longest names, with very many names, and calls that list all leases."""
    name = f"{LEASE_GROUP}/{'h' * 100}"
    asked = {"request": b"r" * 16, "owner": f"{name_of(tls)}~a", "duration_ms": 60_000}
    long = [leases_pb2.LeaseRow(name=f"{name}{number:04}") for number in range(128)]
    said = {
        "Acquire": [
            leases_pb2.LeaseRequest(leases=long, **asked),
            leases_pb2.LeaseRequest(leases=[leases_pb2.LeaseRow()] * 500_000, **asked),
        ],
        "List": [leases_pb2.LeaseListRequest(prefix=f"{LEASE_GROUP}/")],
    }
    async with open_channel(target.address, tls) as channel:

        async def ask(method: str, data: bytes) -> None:
            await channel.get().unary_unary(f"/{LEASE_SERVICE}/{method}")(data)

        tasks = [
            asyncio.create_task(again(lambda method=method, data=data: ask(method, data)))
            for method, messages in said.items()
            for data in (message.SerializeToString() for message in messages)
            for _ in range(8)
        ]
        begun()
        await asyncio.gather(*tasks)


async def cancelled_streams(target: Target, tls: rt.TLS, begun: Begun) -> None:
    """Open streams, send a request on each, and cancel them."""
    pull = encode_pull_request(PullHello(STREAM, PullMerged()))
    method, hello = (PULL_METHOD, pull)
    if tls.identity.role == "publisher":
        method = PUSH_METHOD
        hello = encode_push_request(PushHello(STREAM, f"{name_of(tls)}~c", os.urandom(16)))
    async with open_channel(target.address, tls) as channel:

        async def touch() -> None:
            call: Any = channel.get().stream_stream(method)()
            try:
                await call.write(hello)
                await call.read()
            finally:
                call.cancel()

        async def loop() -> None:
            while True:
                with contextlib.suppress(*TROUBLE):
                    await touch()
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(loop()) for _ in range(16)]
        begun()
        await asyncio.gather(*tasks)


ATTACKS: Final[dict[str, tuple[str, Attack]]] = {
    "stalled_pulls": ("subscribers", stalled_pulls),
    "filtered_pulls": ("subscribers", filtered_pulls),
    "unfinished_pushes": ("publishers", unfinished_pushes),
    "compressed_pushes": ("publishers", compressed_pushes),
    "partial_messages": ("publishers", partial_messages),
    "tiny_messages": ("subscribers", tiny_messages),
    "large_metadata": ("publishers", large_metadata),
    "idle_connections": ("subscribers", idle_connections),
    "rest_floods": ("operators", rest_floods),
    "many_sessions": ("publishers", many_sessions),
    "large_leases": ("subscribers", large_leases),
    "cancelled_pulls": ("subscribers", cancelled_streams),
    "cancelled_pushes": ("publishers", cancelled_streams),
}
"""By name: the attacking role, and the attack that runs for each of its certificates."""


async def _attack(name: str, target: Target) -> None:
    role, attack = ATTACKS[name]
    certificates = [rt.TLS(*paths) for paths in getattr(target, role)]
    begun = [asyncio.Event() for _ in certificates]
    tasks = [
        asyncio.create_task(_forever(attack, target, tls, event.set))
        for tls, event in zip(certificates, begun, strict=True)
    ]
    for event in begun:
        await event.wait()
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    del tasks  # Keeps a reference until here, because the event loop keeps none.
    os._exit(0)  # Like a killed client: nothing is closed properly.


async def _forever(attack: Attack, target: Target, tls: rt.TLS, begun: Begun) -> None:
    await again(lambda: attack(target, tls, begun))


class Attackers:
    """The processes that attack a node. Call `end` to stop them."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def begin(self, name: str, target: Target) -> None:
        """Start an attack. It is running when this returns."""
        command = [sys.executable, str(Path(__file__)), name, json.dumps(asdict(target))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n", name

    def end(self) -> None:
        """End all attacks."""
        for process in self._running:
            process.kill()
        for process in self._running:
            process.communicate()
        self._running.clear()


@contextlib.contextmanager
def attackers() -> Iterator[Attackers]:
    made = Attackers()
    try:
        yield made
    finally:
        made.end()


if __name__ == "__main__":
    asyncio.run(_attack(sys.argv[1], Target(**json.loads(sys.argv[2]))))
