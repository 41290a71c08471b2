"""What a node gets from the others: merged bytes that it cannot make itself, ends of sessions that it lacks.

For one event loop. The law: what comes is checked as whatever comes from anybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from replicator.epoch_check import check_line
from replicator.handshake import NOWHERE, PullHello, PullSession, PullStart, Wanted
from replicator.items import Chunk, Life, Place, Sealed
from replicator.pull_client import PullClient
from replicator.pull_copy import PullCopy
from replicator.wire import PULL_METHOD, decode_pull_reply, encode_pull_request
from rt.errors import NotALog, ProtocolViolation, RtError, StorageError, Timeout
from rt.log.directory import read_header
from rt.log.disk import REAL
from rt.log.segment import SegmentId
from rt.log.table import Identity
from rt.net.rpc import open_channel
from rt.net.rpc_errors import Unreachable, asking
from rt.net.tls import TLS
from sequencer.data.copies import Copies, Copy
from sequencer.state import Session

LOOK_S: Final = 0.02
"""How often catching up looks whether it is there."""
PATIENCE_S: Final = 10.0
"""So long it goes on without anything new: meanwhile what is to be merged may have come another way."""
SILENCE_S: Final = 5.0

logger = logging.getLogger("sequencer")


async def catch_up(
    path: str,
    stream: str,
    endpoints: Sequence[str],
    tls: TLS,
    until: Callable[[Place, int], bool],
    *,
    position: Wanted = "earliest",
    line: int | None = None,
) -> None:
    """Pull merged bytes into `path`, which nobody else writes, until its end satisfies `until`.

    A log that is not there yet begins with the segment that holds `position`. Of peers in epochs of another
    `line` nothing is taken, here and below (`rt.epochs.line_of`; None: it does not matter).

    `rt.Timeout` if nothing new comes, `rt.Diverged` if a peer's log differs from what is here; storage
    errors, and what a certificate is refused with.
    """
    loop = asyncio.get_running_loop()
    known: tuple[Place | None, float] = (None, loop.time())
    copy = PullCopy(path, stream, position=position, retention="own", line=line)
    client = PullClient(copy, stream, endpoints, tls, silence_seconds=SILENCE_S)
    running = asyncio.ensure_future(client.run())
    try:
        while not running.done():
            await asyncio.wait([running], timeout=LOOK_S)
            receiver = copy.receiver
            place = receiver.place if receiver is not None else None
            if place is not None and until(place, copy.position):
                return
            if place != known[0]:
                known = (place, loop.time())
            elif loop.time() - known[1] >= PATIENCE_S:
                raise Timeout("no peer has anything new", where=path, wanted=f"{PATIENCE_S:g} s")
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def fetch_segment(
    path: str,
    identity: Identity,
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
    goal = Place(*segment, end)
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
        raise Unreachable("no peer has that segment", where=segment, got=got, wanted=f"position {first}")


async def fetch_copy(
    copies: Copies,
    path: str,
    session: Session,
    life: Life,
    segment: SegmentId,
    end: int,
    stream: str,
    endpoints: Sequence[str],
    tls: TLS,
    line: int | None = None,
) -> None:
    """Pull a segment of a session's copy into `path`, up to `end` if anybody has it.

    `rt.NotALog` if no peer has any of it, `rt.Unreachable` if one that may have it cannot be asked; storage
    errors.
    """
    copy = await copies.open_aside(session, path, segment)
    refusals: list[RtError] = []
    try:
        for endpoint in endpoints:
            try:
                goal = Place(*segment, end)
                await fetch_session(copies, copy, life, goal, stream, endpoint, tls, line=line)
                return
            except StorageError:
                raise
            except RtError as error:
                refusals.append(error)
        said = "; ".join(map(str, refusals))
        if any(isinstance(error, Unreachable | Timeout) for error in refusals):
            raise Unreachable("not every peer could be asked for that segment", where=path, got=said)
        if copy.receiver.writer.last_id != segment:
            raise NotALog("no peer has that segment", where=path, got=said)
    finally:
        await copy.store.close()


async def fetch_session(
    copies: Copies,
    copy: Copy,
    life: Life,
    end: Place,
    stream: str,
    endpoint: str,
    tls: TLS,
    check: Callable[[], None] = lambda: None,
    *,
    line: int | None = None,
) -> None:
    """Fetch what a copy lacks of a life up to `end` from a peer's copy. The errors of both sides.

    `check` raises what forbids to store more; it is asked right before anything is.
    """
    channel = open_channel(endpoint, tls)
    receiver = copy.receiver
    try:
        with asking(endpoint):
            check()
            await copy.store.restart()
            await copy.store.begin(life)
            place = receiver.place or NOWHERE._replace(x=life.x)
            if place.x < life.x:
                place = Place(life.x, 0, 0)
            elif receiver.chain is None and place.offset:
                place = Place(place.x, place.y + 1, 0)  # The segment there is sealed.
            chain = receiver.chain or 0
            call: Any = channel.get().stream_stream(PULL_METHOD)()
            try:
                wanted = PullSession(copy.session_id, place, chain)
                await call.write(encode_pull_request(PullHello(stream, wanted)))
                await _receive(call, copies, copy, end, check, line)
            finally:
                call.cancel()
    finally:
        await channel.close()


async def _receive(
    call: Any, copies: Copies, copy: Copy, end: Place, check: Callable[[], None], line: int | None
) -> None:
    start = await _next(call)
    if not isinstance(start, PullStart):
        raise ProtocolViolation("a stream begins with a start", got=type(start).__name__)
    check_line(line, start.epoch, start.node)
    while (place := copy.receiver.place) is None or place < end:
        item = await _next(call)
        check()
        if isinstance(item, Chunk):
            if item.end > end:
                item = Chunk(item.place, memoryview(item.data)[: max(0, end.offset - item.place.offset)])
            await copies.take(copy, item)
        elif isinstance(item, Sealed) and item.place < end:
            await copies.take(copy, Sealed(item.place, item.end, False, item.sealed_ns))


async def _next(call: Any) -> object:
    try:
        data = await asyncio.wait_for(call.read(), SILENCE_S)
    except TimeoutError:
        raise Timeout("a peer says nothing more", wanted=f"{SILENCE_S:g} s") from None
    if not isinstance(data, bytes):
        await call.code()
        raise RtError("a peer ended the stream")
    return decode_pull_reply(data)
