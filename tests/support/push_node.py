"""A node for tests of pushing. It stores pushed data in memory, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from replicator.protocol.codec import PUSH_METHOD, decode_push_request, encode_push_reply
from replicator.protocol.handshake import (
    NOWHERE,
    OpenReply,
    PushHello,
    PushProgress,
    PushStart,
    PushStatus,
    SilenceLimit,
)
from replicator.protocol.messages import Chunk, LogOffset, Run, SegmentSealed, WholeRuns
from rt.errors import RtError
from rt.log.disk import REAL
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId, decode_segment_header
from rt.log.scan.directory import list_segments
from rt.log.scan.scanner import SessionScanner
from rt.net.grpc_channel import RpcServer, serve
from rt.net.identity import Identity
from rt.net.tls import TLS
from sequencer.localcluster.loopback import free_port

# isort: split
import grpc
import grpc.aio

CLUSTER = bytes(range(16))


class PushNode:
    """A node called `name` in a cluster of `members`.

    `refusal` is raised at each hello, `rejection` at the first bytes. While `is_still`, the node reads and
    sends nothing more. `lie` replaces its true start offset. `merges`: it reports its own durable data as
    merged, regardless of the other nodes.
    """

    def __init__(self, name: str = "n1", *, members: int = 3, cluster: bytes = CLUSTER) -> None:
        self.name = name
        self.members = members
        self.cluster = cluster
        self.refusal: RtError | None = None
        self.rejection: RtError | None = None
        self.is_still = False
        self.takes_status = True
        self.knows_silence = True
        self.committed = SilenceLimit(0, 0)
        """The publisher's silence limit, as recorded by the cluster."""
        self.settles = True  # It records the silence limit of a status.
        self.opens_lives = True
        self.merges = True
        self.lie: LogOffset | None = None
        self.merged_elsewhere: PushProgress | None = None
        """The progress that it reports while it holds no data."""
        self.hellos: list[PushHello] = []
        self.statuses: list[PushStatus] = []
        self.lives: dict[int, bytes] = {}
        self.sealed: dict[SegmentId, SegmentSealed] = {}
        self.segments: dict[SegmentId, bytearray] = {}
        self.faults: list[str] = []
        self.streams = 0
        self._scanners: dict[SegmentId, SessionScanner] = {}
        self._server: RpcServer | None = None
        self._port = free_port()  # No other caller gets this port while the node is stopped.

    @property
    def endpoint(self) -> str:
        return f"localhost:{self._port}"

    @property
    def place(self) -> LogOffset | None:
        """The offset after the last whole batch here."""
        if not self._scanners:
            return None
        last = max(self._scanners)
        return LogOffset(*last, self._scanners[last].offset)

    @property
    def progress(self) -> PushProgress:
        if not self._scanners:
            return self.merged_elsewhere or PushProgress()
        last = max(self._scanners)
        place, number = LogOffset(*last, self._scanners[last].offset), self._scanners[last].next
        merged = (last.run, number, place) if self.merges else (0, 0, NOWHERE)
        return PushProgress(place, number, *merged)

    def forget(self) -> None:
        """Lose the disk."""
        self.segments.clear()
        self._scanners.clear()
        self.sealed.clear()

    async def start(self, tls: TLS | None = None) -> Self:
        self._server = await serve(
            f"127.0.0.1:{self._port}",
            [self._register],
            roles={PUSH_METHOD: {"publisher"}},
            tls=tls,
            insecure_as=None if tls else lambda: Identity("s", "publisher", "feed"),
        )
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None

    def _register(self, server: grpc.aio.Server) -> None:
        handlers = {"Push": grpc.stream_stream_rpc_method_handler(self._push)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("rt.v1.Replication", handlers),)
        )

    async def _push(self, _: object, context: Any) -> None:
        hello = decode_push_request(await context.read())
        assert isinstance(hello, PushHello)
        self.hellos.append(hello)
        if self.refusal is not None:
            raise self.refusal
        place = self.lie or self.place
        limit = self.committed if self.knows_silence else None
        start = PushStart(self.cluster, 0, self.members, self.name, place, self.takes_status, limit)
        await context.write(encode_push_reply(start))
        await context.write(encode_push_reply(self.progress))
        self.streams += 1
        try:
            await self._take_all(context)
        finally:
            self.streams -= 1

    async def _take_all(self, context: Any) -> None:
        while True:
            while self.is_still:
                await asyncio.sleep(0.005)
            data = await context.read()
            if data is grpc.aio.EOF:
                return
            said = decode_push_request(data)
            if isinstance(said, WholeRuns):
                for item in (item for run in said.runs for item in run.items):
                    await self._take_one(context, item, answers=False)
                await context.write(encode_push_reply(self.progress))
            else:
                await self._take_one(context, said)

    async def _take_one(self, context: Any, said: object, *, answers: bool = True) -> None:
        match said:
            case Chunk() if self.rejection is not None:
                raise self.rejection
            case Chunk() as chunk:
                self._take(chunk)
                if answers:
                    await context.write(encode_push_reply(self.progress))
            case Run(x, life):
                self._check(self.lives.setdefault(x, life) == life, f"X {x} has two lives")
                if self.opens_lives and answers:
                    await context.write(encode_push_reply(OpenReply(x)))
            case PushStatus():
                self.statuses.append(said)
                if said.silence_limit is not None and self.settles:
                    self.committed = said.silence_limit
                    await context.write(encode_push_reply(said.silence_limit))
            case SegmentSealed(place, _, _, _) as sealed:
                self.sealed[place.segment] = sealed
            case other:
                self._check(False, f"unexpected {other}")

    def _take(self, chunk: Chunk) -> None:
        segment = chunk.start.segment
        have = self.segments.setdefault(segment, bytearray())
        self._check(segment.run in self.lives, f"{segment} before its life")
        self._check(chunk.start.offset == len(have), f"{chunk.start} where {len(have)} must follow")
        have += chunk.data
        scanner = self._scanners.get(segment)
        if scanner is None:
            header = decode_segment_header(have, path=segment.file_name)
            scanner = self._scanners[segment] = SessionScanner(header)
        found = scanner.scan(memoryview(bytes(have[scanner.offset :])))
        self._check(found.problem is None, f"{segment}: {found.problem}")

    def _check(self, is_right: bool, fault: str) -> None:
        if not is_right:
            self.faults.append(fault)

    def holds(self, directory: str | Path) -> bool:
        """Whether its segments equal those of the session directory, byte for byte."""
        path = str(directory)
        files = {segment: Path(path, segment.file_name).read_bytes() for segment in list_segments(REAL, path)}
        return {segment: bytes(have) for segment, have in self.segments.items()} == {
            segment: content for segment, content in files.items() if content
        }

    def cut_to_batches(self) -> None:
        """Cut off incomplete batches, as a node does at a restart."""
        for segment, scanner in self._scanners.items():
            del self.segments[segment][max(scanner.offset, SEGMENT_HEADER_BYTES) :]


class NodesInThread:
    """Nodes in an event loop of their own thread, for tests that block."""

    def __init__(self, *nodes: PushNode, tls: TLS | None = None) -> None:
        self.nodes = nodes
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        for node in self.nodes:
            self.do(lambda node=node: node.start(self._tls))
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            self.do(node.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(120)
