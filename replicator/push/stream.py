"""Pushing a session to one node, for ever.

Laws. A stream starts where the node says, and goes on in log order. No chunk of an X is sent before the node
has opened its life. What is sent and not known to be synced is bounded. Whatever ends a stream, another one
is tried, at first soon, then once a second; only trouble with the own log ends it for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from replicator.protocol.codec import PUSH_METHOD, PushAnswered, decode_push_reply, encode_push_request
from replicator.protocol.handshake import NOWHERE, OpenReply, PushProgress, PushStart
from replicator.protocol.messages import CHUNK_BYTES_MAX, Chunk, Item, LogOffset, Run, SegmentSealed
from replicator.push.session_source import SessionSource
from replicator.send.sender import Sender
from rt.errors import (
    CertificateError,
    ClusterMismatch,
    Diverged,
    Fenced,
    InvalidName,
    ProtocolViolation,
    RtError,
    Timeout,
    TooManyFiles,
)
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.log.scan.directory import list_segments, read_table
from rt.net.grpc_channel import Channel, end_call
from rt.net.grpc_errors import Unreachable, asking

# isort: split
import grpc.aio

logger = logging.getLogger("replicator")

_T = TypeVar("_T")

UNACKNOWLEDGED_BYTES_MAX: Final = 64 * 2**20
BACKOFF_SECONDS_MIN: Final = 0.05
BACKOFF_SECONDS_MAX: Final = 1.0
START_SECONDS_MIN: Final = 10.0
START_SECONDS_MAX: Final = 80.0
"""How long a node may take to say where to start: it may have to open and verify a tail first. Twice as long
after each time that it was not enough, for a node that has too much to do would begin anew each time."""

REFUSALS: Final = (Fenced, ClusterMismatch, CertificateError, InvalidName)
"""What a node says that no retry will change. One node may be set up wrongly: it is asked again all the same,
while not all of them say so, or enough of them that it is fenced."""


class LocalLogFailed(Exception):
    """The log that is to be sent cannot be read; `error` says why."""

    def __init__(self, error: RtError) -> None:
        super().__init__(str(error))
        self.error = error


class PushStream:
    """The stream of `log` to `target`. `run` it in a task."""

    def __init__(
        self,
        log: SessionSource,
        target: str,
        channel: Channel,
        *,
        unacknowledged_bytes_max: int = UNACKNOWLEDGED_BYTES_MAX,
    ) -> None:
        self.target = target
        self.refused: RtError | None = None
        """Why the node takes nothing of this session; None if it does, or was not asked yet."""
        self.node: str | None = None
        """Who answers there, while it does."""
        self._log = log
        self._channel = channel
        self._changed = log.changed()
        self._unacknowledged: deque[tuple[LogOffset, int]] = deque()
        self._unacknowledged_bytes = 0
        self._unacknowledged_bytes_max = unacknowledged_bytes_max
        self._answered = asyncio.Event()
        self._opened_run = -1
        self._sent = NOWHERE
        self._found_nothing_at = -1
        self._failures = 0
        self._start_seconds = START_SECONDS_MIN

    @property
    def is_drained(self) -> bool:
        """Whether the node has synced all there was at the last look."""
        return (
            self.node is not None
            and self._found_nothing_at == self._log.looks
            and self._log.levels.safe(self.node) >= self._sent
        )

    async def run(self) -> None:
        """Stream for ever. `LocalLogFailed` alone ends it."""
        while True:
            try:
                with asking(self.target):
                    await self._stream()
            except RtError as error:
                self._note(error)
            finally:
                if self.node is not None:
                    self._log.leave(self.node)
                self.node = None
                self._found_nothing_at = -1
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        """Twice as long after each failure, with jitter: the nodes are not to be met by all at once."""
        self._failures += 1
        longest = min(BACKOFF_SECONDS_MIN * 2 ** min(self._failures - 1, 10), BACKOFF_SECONDS_MAX)
        return random.uniform(longest / 2, longest)

    def _note(self, error: RtError) -> None:
        is_new = self._failures == 0 or (isinstance(error, REFUSALS) and self.refused is None)
        logger.log(
            logging.WARNING if is_new else logging.DEBUG,
            "push_stream_ended endpoint=%s path=%s reason=%s",
            self.target,
            self._log.path,
            error,
        )
        if isinstance(error, REFUSALS):
            self.refused = error
            self._log.progressed.set()

    async def _stream(self) -> None:
        call: Any = self._channel.get().stream_stream(PUSH_METHOD)()
        try:
            start = await self._start(call)
            self.node = start.node
            self._log.start(start)
            self._check_is_wanted(start.place)
            self._begin(start)
            self._log.wake()  # So that there is a look behind the first one.
            sender = _own(lambda: self._sender(start.place))
            with contextlib.closing(sender):
                await _first_of(self._read(call), self._write(call, sender))
        finally:
            end_call(call)

    def _sender(self, place: LogOffset | None) -> Sender:
        log = self._log
        sender = Sender(log.path, place, disk=log.disk, watch=False, shared=log.shared)
        if sender.identity.origin != log.hello.incarnation:
            sender.close()
            raise Fenced("the session directory was made anew", where=log.path, hint="Start again.")
        return sender

    def _check_is_wanted(self, place: LogOffset | None) -> None:
        """`rt.Fenced` if the node wants only what a later start of the publisher brings."""
        newest = -1 if place is None else _own(lambda: _newest_run(self._log))
        if place is not None and place.run > newest:
            raise Fenced(
                "the cluster takes nothing more of this start of the publisher",
                where=self._log.path,
                got=f"X {newest}",
                expected=f"X {place.run} or above",
                hint="Open the publisher again.",
            )

    async def _start(self, call: Any) -> PushStart:
        try:
            async with asyncio.timeout(self._start_seconds):
                await call.write(encode_push_request(self._log.hello))
                start = await _answer(call)
        except asyncio.InvalidStateError:
            start = await _answer(call)  # It ended before it took the hello: that says why.
        except TimeoutError as error:
            self._start_seconds = min(2 * self._start_seconds, START_SECONDS_MAX)
            raise Timeout("the node does not say where to start", where=self.target) from error
        if not isinstance(start, PushStart):
            raise ProtocolViolation("a node must say first where to start", where=self.target)
        return start

    def _begin(self, start: PushStart) -> None:
        logger.info(
            "push_stream_started endpoint=%s node=%s path=%s place=%s",
            self.target,
            start.node,
            self._log.path,
            start.place,
        )
        self.refused = None
        self._failures = 0
        self._start_seconds = START_SECONDS_MIN
        self._unacknowledged.clear()
        self._unacknowledged_bytes = 0
        self._opened_run = -1
        # At the start of a segment there is nothing of it yet, and what precedes it was sealed, so synced.
        place = start.place or NOWHERE
        self._sent = place if place.offset > SEGMENT_HEADER_BYTES else NOWHERE

    # The two directions of a stream

    async def _read(self, call: Any) -> None:
        assert self.node is not None
        while True:
            match await _answer(call):
                case PushProgress() as said:
                    self._acknowledge(said.durable)
                    self._log.report(self.node, said)
                case OpenReply(run):
                    self._opened_run = max(self._opened_run, run)
                case PushStart():
                    raise ProtocolViolation("a node says twice where to start", where=self.target)
            self._answered.set()

    def _acknowledge(self, durable: LogOffset) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= durable:
            self._unacknowledged_bytes -= self._unacknowledged.popleft()[1]

    async def _write(self, call: Any, sender: Sender) -> None:
        while True:
            looks = self._log.looks
            self._changed.clear()
            # A node can acknowledge whole batches only: one that is larger than the bound goes out whole.
            is_bounded = not sender.is_inside_frame
            items = _own(lambda: sender.items(CHUNK_BYTES_MAX))
            for item in items:
                await self._send(call, item, is_bounded=is_bounded)
            if not items:
                self._found_nothing_at = looks
                self._log.on_progress()
            elif self._log.is_ending or _size(items) >= CHUNK_BYTES_MAX:
                continue  # There may be more. What comes behind less than that waits for its round.
            await self._changed.wait()

    async def _send(self, call: Any, item: Item, *, is_bounded: bool) -> None:
        match item:
            case Chunk():
                while is_bounded and self._unacknowledged_bytes >= self._unacknowledged_bytes_max:
                    await self._answer_comes()
                self._unacknowledged.append((item.end, len(item.data)))
                self._unacknowledged_bytes += len(item.data)
                self._sent = item.end
                self._log.note_sending(item.end)
                await call.write(self._log.shared.encoded(item))
                if self.node is not None:
                    self._log.note_sent(self.node, item.end)
            case Run(run):
                _own(lambda: self._log.settle(run))
                await call.write(encode_push_request(item))
                while self._opened_run < run:
                    await self._answer_comes()
            case SegmentSealed():
                await call.write(encode_push_request(item))
            case _:
                raise AssertionError(f"a session has no {item}")

    async def _answer_comes(self) -> None:
        self._answered.clear()
        await self._answered.wait()


def _newest_run(log: SessionSource) -> int:
    """The last start of the publisher; -1 before the first."""
    table, segments = read_table(log.disk, log.path), list_segments(log.disk, log.path)
    known = [*segments, *(sealed.id for sealed in (table.segments if table else ()))]
    return max((segment.run for segment in known), default=-1)


def _size(items: list[Item]) -> int:
    return sum(len(item.data) for item in items if isinstance(item, Chunk))


async def _answer(call: Any) -> PushAnswered:
    data = await call.read()
    if data is grpc.aio.EOF:
        raise Unreachable("the node ended the stream")
    return decode_push_reply(data)


def _own(read: Callable[[], _T]) -> _T:
    """What `read` reads of the own log; a place in it that the node has wrong is the node's matter."""
    try:
        return read()
    except (Diverged, TooManyFiles):  # Of neither it is the log's fault.
        raise
    except RtError as error:
        raise LocalLogFailed(error) from error


async def _first_of(reading: Coroutine[Any, Any, None], writing: Coroutine[Any, Any, None]) -> None:
    """Run both directions until the stream ends; raises why. What the node says is the better reason."""
    reader, writer = asyncio.create_task(reading), asyncio.create_task(writing)
    try:
        await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        if not reader.done() and not isinstance(writer.exception(), LocalLogFailed | RtError):
            await asyncio.wait((reader,), timeout=BACKOFF_SECONDS_MAX)  # The call is over: it will say why.
    finally:
        reader.cancel()
        writer.cancel()
        ends = await asyncio.gather(reader, writer, return_exceptions=True)
    for end in ends[::-1]:
        if isinstance(end, LocalLogFailed | RtError):
            raise end
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, asyncio.InvalidStateError):
            raise end
    raise Unreachable("the stream ended")
