"""Pushes a session to one node, until stopped.

Invariants:
- A stream starts where the node says, and goes on in log order.
- No chunk of a run is sent before the node has opened the run. Runs that are sent whole, many in a message,
  are an exception: the node opens them before it accepts them.
- Sent bytes that are not known to be synced are bounded.
- If a stream ends, another one is tried: at first soon, then once a second. It is tried at once if the old
  one ended because the members changed. It is tried soon if another node was lost: the bytes sent to that
  node may need this one for a majority. Only a fault of the local log ends the pushing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

from msgspec.structs import replace

from replicator.protocol.codec import PUSH_METHOD, PushReply, decode_push_reply, encode_push_request
from replicator.protocol.handshake import (
    NOWHERE,
    OpenReply,
    PushProgress,
    PushStart,
    SilenceLimit,
)
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    Chunk,
    Item,
    LogOffset,
    Run,
    SegmentSealed,
    WholeRuns,
)
from replicator.push.session_source import SessionSource
from replicator.push.stall_detector import StallDetector
from replicator.push.stream_faults import (
    BLOCKING,
    REFUSALS,
    FailureReason,
    RetryPause,
    first_of,
    read_own_log,
)
from replicator.push.whole_runs import joined
from replicator.send.sender import ITEMS_MAX, Sender, carried_bytes
from rt.errors import Fenced, ProtocolViolation, RtError, Timeout
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.net.grpc_channel import Channel, end_call
from rt.net.grpc_errors import MembersChanged, Unreachable, asking
from rt.net.tls import TLS

# isort: split
import grpc.aio

logger = logging.getLogger("replicator")

UNACKNOWLEDGED_BYTES_MAX: Final = 64 * 2**20
START_SECONDS_MIN: Final = 10.0
START_SECONDS_MAX: Final = 80.0
"""How long a node may take to say where to start: it may have to open and verify a tail first. The time
doubles after each timeout, because an overloaded node would start from scratch each time."""


class StreamOwner(Protocol):
    """The owner of the streams of one session, as each stream sees it. Called in the event loop."""

    def admit(self, stream: PushStream, start: PushStart) -> None:
        """A node answered. Must raise an error if the stream should lead to another node."""

    def learn(self, start: PushStart) -> None:
        """A node of the session's cluster and epoch accepted the session. May close any stream."""

    def record_failure(self, stream: PushStream) -> None:
        """The stream failed. May close any stream."""

    def record_lost(self, stream: PushStream) -> None:
        """The stream has ended, and its node was accepting the sent bytes."""

    def on_change(self) -> None:
        """What a stream reports about itself may have changed."""


class PushStream:
    """The stream of `log` to `target`. Run `run` in a task; `close` it before the task is cancelled."""

    def __init__(
        self, log: SessionSource, target: str, channel: Channel, owner: StreamOwner, tls: TLS | None
    ) -> None:
        self.target = target
        self.refused: RtError | None = None
        """Why the node rejects this session; None if it does not, or was not asked yet."""
        self.failure: RtError | None = None
        """Why the last stream ended; None while one runs, and before the first."""
        self.node: str | None = None  # The name of the connected node.
        self.is_renewed = False
        """Whether the node ended the stream because the members changed, and is asked again at once."""
        self.is_closed = False
        self._owner = owner
        self._told_version = 0  # Of the members that the node named last.
        self._renewed_version = -1  # `_told_version` when `is_renewed` was last set to True.
        self._reason = FailureReason(target, tls)
        self._place: LogOffset | None = None
        """Where the current or last stream started; None if the node did not say."""
        self._failed_at: LogOffset | None = None
        """Where the last stream started that ended; None once the node has acknowledged more, or all."""
        self._blocked: tuple[LogOffset | None] | None = None
        """Where the last stream started that ended with one of `BLOCKING`; None once that place is passed."""
        self._source = log
        self._channel = channel
        self._changed = log.changed()
        self._unacknowledged: deque[tuple[LogOffset, int]] = deque()
        self._unacknowledged_bytes = 0
        self._answered = asyncio.Event()
        self._opened_run = -1
        self._sent = NOWHERE
        self._found_nothing_at = -1
        self._pause = RetryPause()
        self._start_seconds = START_SECONDS_MIN
        self._stall = StallDetector()
        self._writing = asyncio.Lock()  # gRPC sends one message of a call at a time.

    @property
    def is_drained(self) -> bool:
        """Whether the node has synced everything that the last poll found."""
        return (
            self.node is not None
            and self._found_nothing_at == self._source.poll_count
            and self._source.quorum.safe(self.node) >= self._sent
        )

    @property
    def start(self) -> LogOffset:
        """Where the node needed the log when it was connected; what precedes is stored or merged."""
        return NOWHERE if self.node is None or self._place is None else self._place

    @property
    def is_serving(self) -> bool:
        """Whether the node accepts the session now, or did until it ended the stream to be asked again."""
        return (self.node is not None or self.is_renewed) and self.refused is None

    @property
    def is_accepting(self) -> bool:
        """Whether the node takes what is sent, as far as is known: it did not end the last stream here."""
        return self.node is not None and self.refused is None and self._place != self._failed_at

    def close(self) -> None:
        """Stop using the endpoint: another stream may lead to its node from now on."""
        self.is_closed = True
        self._leave_node()
        self._source.stop_listening(self._changed)

    def _leave_node(self) -> None:
        was_accepting = self.is_accepting
        if self.node is not None:
            self._source.remove(self.node)
        self.node, self._found_nothing_at = None, -1
        if was_accepting:
            self._owner.record_lost(self)

    async def run(self) -> None:
        """Stream until closed or cancelled. Only `LocalLogFailed` ends it."""
        while not self.is_closed:
            self._place = None
            error: RtError = Unreachable("the stream ended", where=self.target)
            try:
                with asking(self.target):
                    await self._stream()
            except RtError as ended:
                error = ended
            finally:
                self._leave_node()
            if isinstance(error, MembersChanged) and self._told_version > self._renewed_version:
                self._renewed_version, self.is_renewed = self._told_version, True
                continue
            self._record_failure(await self._reason.find(error, self.failure))
            if await self._pause.wait():
                self._channel.renew()

    def hurry(self) -> None:
        """Connect soon, if it is not connected."""
        if self.node is None:
            self._pause.shorten()

    def _record_failure(self, error: RtError) -> None:
        logger.debug("push_stream_ended endpoint=%s path=%s reason=%s", self.target, self._source.path, error)
        self.failure = error
        self._failed_at = self._place or self._failed_at
        blocked = (self._place,) if isinstance(error, BLOCKING) else None
        if isinstance(error, REFUSALS) or (blocked is not None and blocked == self._blocked):
            self.refused = error
            self._source.progressed.set()
        self._blocked = blocked or self._blocked
        self.is_renewed = False
        if not self.is_closed:
            self._owner.record_failure(self)
            self._owner.on_change()

    async def _stream(self) -> None:
        call: Any = self._channel.get().stream_stream(PUSH_METHOD)()
        try:
            start = await self._read_start(call)
            self._owner.admit(self, start)
            self.node, self._told_version = start.node, start.nodes.version
            self._source.start(start)
            self._owner.learn(start)
            if self.is_closed:
                return
            self._check_is_wanted(start.offset)
            self._reset(start)
            self._source.wake()  # So that there is another poll after the first one.
            sender = read_own_log(lambda: self._sender(start.offset))
            with contextlib.closing(sender):
                async with self._saying_status(call, start):
                    await first_of(self._read(call), self._write(call, sender))
        finally:
            end_call(call)

    def _sender(self, place: LogOffset | None) -> Sender:
        log = self._source
        sender = Sender(log.path, place, disk=log.disk, shared=log.read_cache)
        if sender.identity.origin != log.hello.incarnation:
            sender.close()
            raise Fenced(
                "the session directory was replaced by a new one",
                where=log.path,
                hint="Restart the push client.",
            )
        return sender

    def _check_is_wanted(self, place: LogOffset | None) -> None:
        """`rt.Fenced` if the node expects only later runs of the publisher."""
        newest = -1 if place is None else read_own_log(self._source.newest_run)
        if place is not None and place.run > newest:
            raise Fenced(
                "the cluster accepts nothing more of this run of the publisher",
                where=self._source.path,
                got=f"run {newest}",
                expected=f"run {place.run} or later",
                hint="Open the publisher again.",
            )

    async def _read_start(self, call: Any) -> PushStart:
        try:
            async with asyncio.timeout(self._start_seconds):
                await call.write(encode_push_request(self._source.hello))
                start = await _read_answer(call)
        except asyncio.InvalidStateError:
            start = await _read_answer(call)  # The call ended before the hello was read: the answer says why.
        except TimeoutError as error:
            self._start_seconds = min(2 * self._start_seconds, START_SECONDS_MAX)
            raise Timeout("the node did not say where to start in time", where=self.target) from error
        if not isinstance(start, PushStart):
            raise ProtocolViolation("the node did not begin with where to start", where=self.target)
        return start

    def _reset(self, start: PushStart) -> None:
        said = self.target, start.node, self._source.path, start.offset
        logger.info("push_stream_started endpoint=%s node=%s path=%s place=%s", *said)
        self._place, self.is_renewed = start.offset or NOWHERE, False
        if self._blocked != (self._place,):
            self._unblock()
        if self._place != self._failed_at:
            self._pause.failures = 0
        self._start_seconds = START_SECONDS_MIN
        self._unacknowledged.clear()
        self._unacknowledged_bytes = 0
        self._opened_run, self._stall = -1, StallDetector()
        # At the start of a segment the node has no byte of it. Earlier bytes were sealed, so they are synced.
        self._sent = self._place if self._place.offset > SEGMENT_HEADER_BYTES else NOWHERE

    def _unblock(self) -> None:
        self.refused = self.failure = self._blocked = None
        self._reason.reset()
        self._owner.on_change()

    async def _read(self, call: Any) -> None:
        node = self.node
        assert node is not None
        while True:
            answer = await _read_answer(call)
            if self.is_closed:
                return  # The stream was closed meanwhile: the node may no longer count.
            match answer:
                case PushProgress() as said:
                    self._acknowledge(said.durable)
                    self._source.report(node, said)
                case OpenReply(x):
                    self._opened_run = max(self._opened_run, x)
                case SilenceLimit() as limit:
                    self._source.silence.settle(limit)
                    self._source.record_progress()
                case PushStart():
                    raise ProtocolViolation("the node repeated where to start", where=self.target)
            self._answered.set()

    def _acknowledge(self, durable: LogOffset) -> None:
        if self._blocked is not None and durable > (self._blocked[0] or NOWHERE):
            self._unblock()
        self._settle(is_due=durable > (self._place or NOWHERE))
        while self._unacknowledged and self._unacknowledged[0][0] <= durable:
            self._unacknowledged_bytes -= self._unacknowledged.popleft()[1]

    def _settle(self, *, is_due: bool) -> None:
        """`is_due`: the node acknowledged more than before the last failure, or has everything."""
        if is_due and self._failed_at is not None:
            self._failed_at, self._pause.failures = None, 0
            self._owner.on_change()

    async def _write(self, call: Any, sender: Sender) -> None:
        while True:
            looks = self._source.poll_count
            self._changed.clear()
            # A node acknowledges whole batches only: a batch larger than the bound is sent whole.
            is_bounded = not sender.is_inside_frame
            items = read_own_log(lambda: sender.items(CHUNK_BYTES_MAX))
            for item in joined(items):
                await self._send(call, item, is_bounded=is_bounded)
            if not items:
                self._found_nothing_at = looks
                has_all = self.node is not None and self._source.quorum.durable(self.node) >= self._sent
                self._settle(is_due=has_all)
                self._source.record_progress()
            elif self._source.is_ending or carried_bytes(items) >= CHUNK_BYTES_MAX or len(items) >= ITEMS_MAX:
                continue  # There may be more. A message that is not full waits for its round.
            await self._changed.wait()

    async def _send(self, call: Any, item: Item | WholeRuns, *, is_bounded: bool) -> None:
        match item:
            case Chunk():
                await self._record_sending(item.end, len(item.data), is_bounded=is_bounded)
                await self._put(call, self._source.read_cache.encoded(item))
                if self.node is not None:
                    self._source.record_sent(self.node, item.end)
            case WholeRuns(runs):
                read_own_log(lambda: self._source.persist_run(runs[-1].run.number))
                end, size = runs[-1].end_offset, sum(len(one.data) for one in runs)
                await self._record_sending(end, size, is_bounded=is_bounded)
                await self._put(call, encode_push_request(item))
                if self.node is not None:
                    self._source.record_sent(self.node, end)
            case Run(x):
                read_own_log(lambda: self._source.persist_run(x))
                await self._put(call, encode_push_request(item))
                while self._opened_run < x:
                    await self._wait_answer()
            case SegmentSealed():
                await self._put(call, encode_push_request(item))
            case _:
                raise AssertionError(f"not an item of a session: {item}")

    async def _put(self, call: Any, message: bytes) -> None:
        async with self._writing:
            await call.write(message)

    @contextlib.asynccontextmanager
    async def _saying_status(self, call: Any, start: PushStart) -> AsyncIterator[None]:
        """Say how the push stands meanwhile: a node that hears nothing knows that this process is stopped."""
        saying = asyncio.create_task(self._say_status(call, start))
        try:
            yield
        finally:
            saying.cancel()
            # The reader and the writer report why a call ended.
            await asyncio.gather(saying, return_exceptions=True)

    async def _say_status(self, call: Any, start: PushStart) -> None:
        while start.takes_status:
            reached = max(self._source.quorum.safe(start.node), self._place or NOWHERE)
            now_s, waiting_bytes = asyncio.get_running_loop().time(), self._source.bytes_after(reached)
            status = self._stall.update(now_s, reached, waiting_bytes)
            limit = None if start.silence_limit is None else self._source.silence.state()
            await self._put(call, encode_push_request(replace(status, silence_limit=limit)))
            await self._source.wait_for_status(is_urgent=limit is not None)

    async def _record_sending(self, end: LogOffset, size: int, *, is_bounded: bool) -> None:
        """Wait until `size` more bytes may be sent, then record that everything before `end` is sent."""
        while is_bounded and self._unacknowledged_bytes >= UNACKNOWLEDGED_BYTES_MAX:
            await self._wait_answer()
        self._unacknowledged.append((end, size))
        self._unacknowledged_bytes += size
        self._sent = end
        self._source.record_sending(end)

    async def _wait_answer(self) -> None:
        self._answered.clear()
        await self._answered.wait()


async def _read_answer(call: Any) -> PushReply:
    data = await call.read()
    if data is grpc.aio.EOF:
        raise Unreachable("the node ended the stream")
    return decode_push_reply(data)
