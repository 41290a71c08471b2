"""What a node gets from the others: merged bytes that it cannot make itself, session bytes that it lacks.

For one event loop. The law: what comes is checked as whatever comes from anybody else.
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
from sequencer.sessions.replicas import SessionReplica, SessionReplicas
from sequencer.state.state import Session

LOOK_S: Final = 0.02
"""How often catching up looks whether it is there."""
PATIENCE_S: Final = 10.0
"""So long it goes on without anything new: meanwhile what is to be merged may have come another way."""
SILENCE_S: Final = 5.0
IDLE_S: Final = 1.0
"""After so long without anything new it is asked whether there is anything to come."""
RANGE_SILENCE_S: Final = 2.0
"""A peer that does not go on with a range for so long may not have all of it: another one is asked."""

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
    may_come: Callable[[int], Awaitable[bool]] | None = None,
) -> None:
    """Pull merged bytes into `path`, which nobody else writes, until its end satisfies `until`.

    A log that is not there yet begins with the segment that holds `position`. Of peers in epochs of another
    `line` nothing is taken, here and below (`rt.cluster_epoch.line_of`; None: it does not matter).
    `may_come` is asked with the position here, each time nothing new has come for `IDLE_S`. False ends it.

    `rt.Timeout` if nothing new comes, `rt.Diverged` if a peer's log differs from what is here; storage
    errors, and what a certificate is refused with.
    """
    loop = asyncio.get_running_loop()
    known: tuple[LogOffset | None, float] = (None, loop.time())
    asked_s = loop.time()
    copy = LocalCopy(path, stream, position=position, retention="own", line=line)
    client = PullClient(copy, stream, endpoints, tls, silence_seconds=SILENCE_S)
    running = asyncio.ensure_future(client.run())
    try:
        while not running.done():
            await asyncio.wait([running], timeout=LOOK_S)
            receiver = copy.receiver
            place = receiver.next_offset if receiver is not None else None
            if place is not None and until(place, copy.position):
                return
            if place != known[0]:
                known, asked_s = (place, loop.time()), loop.time()
            elif loop.time() - known[1] >= PATIENCE_S:
                raise Timeout("no peer has anything new", where=path, expected=f"{PATIENCE_S:g} s")
            elif may_come is not None and loop.time() - asked_s >= IDLE_S:
                if not await may_come(copy.position):
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
    """Pull the merged segment that begins with position `first` into `path`, up to `end` if anybody has it.

    `rt.Unreachable` if no peer has any of it; what else `catch_up` raises but `rt.Timeout`.
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


async def fetch_copy(
    copies: SessionReplicas,
    path: str,
    session: Session,
    life: Run,
    segment: SegmentId,
    end: int,
    stream: str,
    endpoints: Sequence[str],
    tls: TLS,
    line: int | None = None,
) -> None:
    """Pull a segment of a session's copy into `path`, up to `end` if anybody has it.

    `rt.LogNotFound` if no peer has any of it, `rt.Unreachable` if one that may have it cannot be asked;
    storage errors.
    """
    copy = await copies.open_aside(session, path, segment)
    refusals: list[RtError] = []
    try:
        for endpoint in endpoints:
            channel = open_channel(endpoint, tls)
            try:
                goal = LogOffset(*segment, end)
                await fetch_session(copies, copy, life, goal, stream, channel, line=line)
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


async def merged_end(channel: Channel, stream: str, line: int | None) -> int:
    """One past the last position of a peer's merged log as it is now. The errors of both sides."""
    wanted = PullMerged(position="earliest", range=PullRange(0))
    try:
        with asking(channel.target):
            call: Any = channel.get().stream_stream(PULL_METHOD)()
            try:
                await call.write(encode_pull_request(PullHello(stream, wanted)))
                return (await _started(call, line, RANGE_SILENCE_S)).end
            finally:
                call.cancel()
    except NothingMergedYet:
        return 0


async def fetch_range(
    channel: Channel, stream: str, wanted: SessionRange, incarnation: bytes, line: int | None
) -> FetchedRange:
    """Fetch a range of a session's segment from a peer's copy into memory. The errors of both sides.

    What is returned has the chains that `wanted` names. `rt.LogNotFound` if the peer does not keep the range,
    `rt.Corrupt` if it has other bytes there.
    """
    with asking(channel.target):
        call: Any = channel.get().stream_stream(PULL_METHOD)()
        try:
            place = LogOffset(*wanted.segment, wanted.start)
            asked = PullSession(wanted.session_id, place, wanted.chain_start)
            await call.write(encode_pull_request(PullHello(stream, asked)))
            start = await _started(call, line, RANGE_SILENCE_S)
            if start.cluster != incarnation:
                raise ClusterMismatch(
                    "a copy of another incarnation", got=start.cluster.hex(), expected=incarnation.hex()
                )
            if start.offset != place:
                raise LogNotFound("the peer does not keep that range", where=wanted.segment, got=start.offset)
            return await _range(call, wanted, incarnation, start.first)
        finally:
            call.cancel()


async def _range(call: Any, wanted: SessionRange, incarnation: bytes, first: int) -> FetchedRange:
    header = SegmentHeader(LogKind.SESSION, wanted.segment, first, 0, incarnation)
    scanner = SessionScanner(header, offset=wanted.start, first=first, marks=True, chain=wanted.chain_start)
    marks = BatchIndex()
    marks.add([ChecksummedBoundary(wanted.start, first, wanted.chain_start, 0, 0, CONTENT_START)])
    whole, rest, rest_bytes, needed = list[bytes](), list[bytes](), 0, 0
    while scanner.offset < wanted.end:
        item = await _next(call, RANGE_SILENCE_S)
        following = LogOffset(*wanted.segment, scanner.offset + rest_bytes)
        if not isinstance(item, Chunk) or item.start != following:
            raise LogNotFound(
                "the peer's copy ends before that range does", where=following, expected=wanted.end
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
    if (behind := marks.stretch(wanted.start, wanted.end)) is None or behind.chain_end != wanted.chain_end:
        raise Corrupt("a peer's copy has other bytes", path=wanted.segment.file_name, offset=wanted.start)
    return FetchedRange(wanted, memoryview(b"".join(whole))[: wanted.end - wanted.start], marks)


async def fetch_session(
    copies: SessionReplicas,
    copy: SessionReplica,
    life: Run,
    end: LogOffset,
    stream: str,
    channel: Channel,
    check: Callable[[], None] = lambda: None,
    *,
    line: int | None = None,
    follows: bool = False,
) -> None:
    """Fetch what a copy lacks of a life up to `end` from a peer's copy. The errors of both sides.

    `check` raises what forbids to store more; it is asked right before anything is. With `follows` it goes on
    after `end`, until the peer has nothing more of the life for `SILENCE_S`.
    """
    receiver = copy.receiver
    try:
        with asking(channel.target):
            check()
            await copy.store.restart()
            await copy.store.start_run(life)
            place = receiver.next_offset or NOWHERE._replace(run=life.number)
            if place.run < life.number:
                place = LogOffset(life.number, 0, 0)
            elif receiver.chain is None and place.offset:
                place = LogOffset(place.run, place.roll + 1, 0)  # The segment there is sealed.
            chain = receiver.chain or 0
            call: Any = channel.get().stream_stream(PULL_METHOD)()
            try:
                wanted = PullSession(copy.session_id, place, chain)
                await call.write(encode_pull_request(PullHello(stream, wanted)))
                await _receive(call, copies, copy, end, check, line, follows=follows)
            finally:
                call.cancel()
    finally:
        if not copy.has_stream:
            with contextlib.suppress(RtError):  # What the copy refuses with, was raised before.
                await copy.store.restart()


async def _receive(
    call: Any,
    copies: SessionReplicas,
    copy: SessionReplica,
    end: LogOffset,
    check: Callable[[], None],
    line: int | None,
    *,
    follows: bool,
) -> None:
    await _started(call, line)
    while True:
        place = copy.receiver.next_offset
        is_there = place is not None and place >= end
        if is_there and not follows:
            return
        try:
            item = await _next(call)
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
            await copies.take(copy, item)
        elif isinstance(item, SegmentSealed) and (follows or item.end_offset < end):
            await copies.take(copy, SegmentSealed(item.end_offset, item.end, False, item.sealed_ns))


async def _started(call: Any, line: int | None, silence_s: float | None = None) -> PullStart:
    start = await _next(call, silence_s)
    if not isinstance(start, PullStart):
        raise ProtocolViolation("a stream begins with a start", got=type(start).__name__)
    check_line(line, start.epoch, start.node)
    return start


async def _next(call: Any, silence_s: float | None = None) -> object:
    silence_s = SILENCE_S if silence_s is None else silence_s
    try:
        data = await asyncio.wait_for(call.read(), silence_s)
    except TimeoutError:
        raise Timeout("a peer says nothing more", expected=f"{silence_s:g} s") from None
    if not isinstance(data, bytes):
        await call.code()
        raise RtError("a peer ended the stream")
    return decode_pull_reply(data)
