"""Pulls from peers: merged bytes that this node cannot make itself, and session bytes that it is missing.

For one event loop. All received bytes are checked in the same way as bytes from any other peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from replicator.protocol.codec import PULL_METHOD, decode_pull_reply, encode_pull_request
from replicator.protocol.epoch_check import check_line
from replicator.protocol.handshake import (
    NOWHERE,
    PullHello,
    PullMerged,
    PullRange,
    PullSession,
    PullStart,
    Wanted,
)
from replicator.protocol.messages import Chunk, LogOffset, Run, SegmentSealed
from replicator.pull.client import PullClient
from replicator.pull.local_copy import LocalCopy
from rt.errors import ClusterMismatch, Corrupt, LogNotFound, ProtocolViolation, RtError, StorageError, Timeout
from rt.log.disk import REAL
from rt.log.format.running_checksum import CONTENT_START, ChecksummedBoundary
from rt.log.format.segment import LogKind, SegmentHeader, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.directory import read_header
from rt.log.scan.scanner import SessionScanner
from rt.net.grpc_channel import Channel, open_channel
from rt.net.grpc_errors import NothingMergedYet, Unreachable, asking
from rt.net.tls import TLS
from sequencer.sessions.batch_index import BatchIndex
from sequencer.sessions.input_planner import FetchedRange, SessionRange
from sequencer.sessions.replica import SessionReplica
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.state import Session

POLL_S: Final = 0.02
"""How often `catch_up` checks whether it is done."""
PATIENCE_S: Final = 10.0
"""How long catching up continues without new bytes: they may have arrived another way meanwhile."""
SILENCE_S: Final = 5.0
IDLE_S: Final = 1.0
"""After this time without new bytes, `may_arrive` is asked whether any are left."""
logger = logging.getLogger("sequencer")


async def catch_up(
    path: str,
    stream: str,
    endpoints: Sequence[str],
    tls: TLS,
    until: Callable[[LogOffset, int], bool],
    *,
    position: Wanted = "earliest",
    line: int | None = None,
    may_arrive: Callable[[int], Awaitable[bool]] | None = None,
) -> None:
    """Pull merged bytes into `path`, which nothing else writes, until its end satisfies `until`.

    A new log starts with the segment that contains `position`. `line`, here and below: bytes of peers in
    epochs of another line are refused (`rt.cluster_epoch.line_of`; None: any line is accepted). `may_arrive`
    is called with the position here each time nothing new has arrived for `IDLE_S`. If it returns False,
    `catch_up` returns.

    `rt.Timeout` if nothing new arrives, `rt.Diverged` if a peer's log differs from the log here; storage
    errors, and errors of certificates.
    """
    loop = asyncio.get_running_loop()
    known: tuple[LogOffset | None, float] = (None, loop.time())
    asked_s = loop.time()
    copy = LocalCopy(path, stream, position=position, retention="own", line=line)
    client = PullClient(copy, stream, endpoints, tls, silence_seconds=SILENCE_S)
    running = asyncio.ensure_future(client.run())
    try:
        while not running.done():
            await asyncio.wait([running], timeout=POLL_S)
            receiver = copy.receiver
            place = receiver.next_offset if receiver is not None else None
            if place is not None and until(place, copy.position):
                return
            if place != known[0]:
                known, asked_s = (place, loop.time()), loop.time()
            elif loop.time() - known[1] >= PATIENCE_S:
                raise Timeout("no peer has anything new", where=path, expected=f"{PATIENCE_S:g} s")
            elif may_arrive is not None and loop.time() - asked_s >= IDLE_S:
                if not await may_arrive(copy.position):
                    return
                asked_s = loop.time()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def fetch_segment(
    path: str,
    identity: LogIdentity,
    segment: SegmentId,
    first: int,
    end: int,
    endpoints: Sequence[str],
    tls: TLS,
    line: int | None = None,
) -> None:
    """Pull the merged segment that starts with position `first` into `path`, up to `end` if any peer has it.

    `rt.Unreachable` if no peer has any of it; the errors of `catch_up` except `rt.Timeout`.
    """
    goal = LogOffset(*segment, end)
    with contextlib.suppress(Timeout):
        await catch_up(
            path,
            identity.name,
            endpoints,
            tls,
            lambda place, _: place >= goal,
            position=first,
            line=line,
        )
    header = read_header(REAL, path, segment)
    if header is None or (header.first, header.origin) != (first, identity.origin):
        got = None if header is None else f"position {header.first} of {header.origin.hex()}"
        raise Unreachable("no peer has that segment", where=segment, got=got, expected=f"position {first}")


async def fetch_replica(
    replicas: SessionReplicas,
    path: str,
    session: Session,
    opened: Run,
    segment: SegmentId,
    end: int,
    stream: str,
    endpoints: Sequence[str],
    tls: TLS,
    line: int | None = None,
) -> None:
    """Pull a segment of a session replica into `path`, up to `end` if any peer has it.

    `rt.LogNotFound` if no peer has any of it, `rt.Unreachable` if a peer that may have it cannot be asked;
    storage errors.
    """
    copy = await replicas.open_aside(session, path, segment)
    refusals: list[RtError] = []
    try:
        for endpoint in endpoints:
            channel = open_channel(endpoint, tls)
            try:
                goal = LogOffset(*segment, end)
                await fetch_session(replicas, copy, opened, goal, stream, channel, line=line)
                return
            except StorageError:
                raise
            except RtError as error:
                refusals.append(error)
            finally:
                await channel.close()
        said = "; ".join(map(str, refusals))
        if any(isinstance(error, Unreachable | Timeout) for error in refusals):
            raise Unreachable("not every peer could be asked for that segment", where=path, got=said)
        if copy.receiver.writer.last_id != segment:
            raise LogNotFound("no peer has that segment", where=path, got=said)
    finally:
        await copy.store.close()


async def merged_end(channel: Channel, stream: str, line: int | None, silence_s: float) -> int:
    """One past the last position of a peer's merged log now. Errors of this node and of the peer;
    `rt.Timeout` if the peer sends nothing for `silence_s`.
    """
    wanted = PullMerged(position="earliest", range=PullRange(0))
    try:
        with asking(channel.target):
            call: Any = channel.get().stream_stream(PULL_METHOD)()
            try:
                await call.write(encode_pull_request(PullHello(stream, wanted)))
                return (await _started(call, line, silence_s)).end
            finally:
                call.cancel()
    except NothingMergedYet:
        return 0


async def fetch_range(
    channel: Channel,
    stream: str,
    wanted: SessionRange,
    incarnation: bytes,
    line: int | None,
    silence_s: float,
) -> FetchedRange:
    """Fetch a range of a session's segment from a peer's replica into memory.

    The result has the running checksums that `wanted` names. Errors of this node and of the peer;
    `rt.LogNotFound` if the peer does not keep the range, `rt.Corrupt` if it has other bytes there,
    `rt.Timeout` if it sends nothing for `silence_s`.
    """
    with asking(channel.target):
        call: Any = channel.get().stream_stream(PULL_METHOD)()
        try:
            place = LogOffset(*wanted.segment, wanted.start)
            asked = PullSession(wanted.session_id, place, wanted.chain_start)
            await call.write(encode_pull_request(PullHello(stream, asked)))
            start = await _started(call, line, silence_s)
            if start.cluster != incarnation:
                raise ClusterMismatch(
                    "a replica of another incarnation", got=start.cluster.hex(), expected=incarnation.hex()
                )
            if start.offset != place:
                raise LogNotFound("the peer does not keep that range", where=wanted.segment, got=start.offset)
            return await _range(call, wanted, incarnation, start.first, silence_s)
        finally:
            call.cancel()


async def _range(
    call: Any, wanted: SessionRange, incarnation: bytes, first: int, silence_s: float
) -> FetchedRange:
    header = SegmentHeader(LogKind.SESSION, wanted.segment, first, 0, incarnation)
    scanner = SessionScanner(header, offset=wanted.start, first=first, marks=True, chain=wanted.chain_start)
    marks = BatchIndex()
    marks.add([ChecksummedBoundary(wanted.start, first, wanted.chain_start, 0, 0, CONTENT_START)])
    whole, rest, rest_bytes, needed = list[bytes](), list[bytes](), 0, 0
    while scanner.offset < wanted.end:
        item = await _next(call, silence_s)
        following = LogOffset(*wanted.segment, scanner.offset + rest_bytes)
        if not isinstance(item, Chunk) or item.start != following:
            raise LogNotFound(
                "the peer's replica ends before that range does", where=following, expected=wanted.end
            )
        rest.append(bytes(item.data))
        rest_bytes += len(item.data)
        if rest_bytes < needed:
            continue
        data = b"".join(rest)
        found = scanner.scan(memoryview(data))
        if found.problem is not None:
            raise Corrupt(found.problem, path=wanted.segment.file_name, offset=scanner.offset)
        marks.add(found.marks)
        whole.append(data[: found.consumed])
        rest, rest_bytes, needed = [data[found.consumed :]], len(data) - found.consumed, found.needed
    if (behind := marks.range_info(wanted.start, wanted.end)) is None or behind.chain_end != wanted.chain_end:
        raise Corrupt("a peer's replica has other bytes", path=wanted.segment.file_name, offset=wanted.start)
    return FetchedRange(wanted, memoryview(b"".join(whole))[: wanted.end - wanted.start], marks)


async def fetch_session(
    replicas: SessionReplicas,
    copy: SessionReplica,
    opened: Run,
    end: LogOffset,
    stream: str,
    channel: Channel,
    check: Callable[[], None] = lambda: None,
    *,
    line: int | None = None,
    follows: bool = False,
) -> None:
    """Fetch the bytes of a run that are missing in a replica, up to `end`, from a peer.

    `check` is called before each write, and raises an error if nothing more may be stored. With `follows`,
    the fetch continues after `end`, until the peer has no new bytes of the run for `SILENCE_S`. Errors of
    this node and of the peer.
    """
    receiver = copy.receiver
    try:
        with asking(channel.target):
            check()
            await copy.store.restart()
            await copy.store.start_run(opened)
            place = receiver.next_offset or NOWHERE._replace(run=opened.number)
            if place.run < opened.number:
                place = LogOffset(opened.number, 0, 0)
            elif receiver.chain is None and place.offset:
                place = LogOffset(place.run, place.roll + 1, 0)  # The segment there is sealed.
            chain = receiver.chain or 0
            call: Any = channel.get().stream_stream(PULL_METHOD)()
            try:
                wanted = PullSession(copy.session_id, place, chain)
                await call.write(encode_pull_request(PullHello(stream, wanted)))
                await _receive(call, replicas, copy, end, check, line, follows=follows)
            finally:
                call.cancel()
    finally:
        if not copy.has_stream:
            with contextlib.suppress(RtError):  # An error of the replica was raised before.
                await copy.store.restart()


async def _receive(
    call: Any,
    replicas: SessionReplicas,
    copy: SessionReplica,
    end: LogOffset,
    check: Callable[[], None],
    line: int | None,
    *,
    follows: bool,
) -> None:
    await _started(call, line, SILENCE_S)
    while True:
        place = copy.receiver.next_offset
        is_there = place is not None and place >= end
        if is_there and not follows:
            return
        try:
            item = await _next(call, SILENCE_S)
        except Timeout:
            if is_there:
                return
            raise
        check()
        if isinstance(item, SegmentSealed) and item.end_offset.run != end.run:
            return
        if isinstance(item, Chunk):
            if item.start.run != end.run:
                return
            if item.end > end and not follows:
                item = Chunk(item.start, memoryview(item.data)[: max(0, end.offset - item.start.offset)])
            await replicas.append(copy, item)
        elif isinstance(item, SegmentSealed) and (follows or item.end_offset < end):
            await replicas.append(copy, SegmentSealed(item.end_offset, item.end, False, item.sealed_ns))


async def _started(call: Any, line: int | None, silence_s: float) -> PullStart:
    start = await _next(call, silence_s)
    if not isinstance(start, PullStart):
        raise ProtocolViolation("the first message of a stream must be a start", got=type(start).__name__)
    check_line(line, start.epoch, start.node)
    return start


async def _next(call: Any, silence_s: float) -> object:
    try:
        async with asyncio.timeout(silence_s):
            data = await call.read()
    except TimeoutError:
        raise Timeout("a peer sent nothing", expected=f"a message within {silence_s:g} s") from None
    if not isinstance(data, bytes):
        await call.code()
        raise RtError("a peer ended the stream")
    return decode_pull_reply(data)
