"""Open calls of a gRPC server: which may read their next message, and which are ended when memory is short.

gRPC buffers the received part of a message until the message is complete, and does not report the size of
that part. So a call that waits for a message may hold `MESSAGE_BYTES_MAX`, for any peer. A call that does not
wait for a message holds a window, `SERVER_WINDOW_BYTES`.

Invariants:
- While the messages that handlers hold reach `READ_BYTES_MAX` in total, a call does not wait for another
  message if a handler holds a message of the same identity. So handlers that do not return block only their
  own identity.
- The next call that may wait for a message belongs to the identity whose handlers hold the fewest bytes.
  Calls of nodes never queue for this: handlers may need the messages of nodes.
- While memory is short, a call starts to wait for its next message `PAUSE_S` later.
- Calls that have waited for a message for `STALLED_S` are ended before calls that make progress.
- The identity with the most calls loses the next call. It keeps `CALLS_KEPT` calls, unless memory is very
  short.
- Calls of nodes are not ended: their messages are needed to merge.
- A call is ended with `rt.Overloaded`, so that its peer calls again.

For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

from rt.errors import Overloaded
from rt.net.grpc_options import MESSAGE_BYTES_MAX
from rt.net.identity import Identity

# isort: split
import grpc.aio

STALLED_S: Final = 1.0
"""At 1 MiB/s, a message of the largest size arrives within this time. A slower call is ended only while
memory is short.
"""
READ_BYTES_MAX: Final = 24 * 2**20
"""Limit for the messages of all calls that were read and are not handled yet."""
PAUSE_S: Final = 0.25
"""Pause before the next message of each call, while memory is short. During the pause, the message waits at
the peer.
"""
CALLS_WHILE_SHORT_MAX: Final = 4
"""Calls of one identity while memory is short: new ones above this are rejected."""
CALLS_KEPT: Final = 2
"""Calls of one identity that are not ended, unless memory is very short."""


class ReadBudget:
    """The messages that handlers hold, and the calls that wait until this is less. For one event loop."""

    def __init__(self) -> None:
        self.total = 0
        self.has_memory = asyncio.Event()
        """Cleared while memory is short."""
        self.has_memory.set()
        self._held: Counter[str] = Counter()
        """Bytes of messages that handlers hold, by the identity's URI."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting calls, by the identity's URI. No queue is empty."""

    def add(self, uri: str, size: int) -> None:
        """Record that handlers of an identity hold `size` more bytes."""
        self.total += size
        self._held[uri] += size
        if not self._held[uri]:
            del self._held[uri]
            self._let(uri)
        self._let_next()

    async def has_room(self, uri: str) -> None:
        """Return when a call of the identity may wait for a message."""
        if not self.has_memory.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self.has_memory.wait()
        if self.total < READ_BYTES_MAX or uri not in self._held:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uri, deque()).append(turn)
        try:
            await turn
        finally:
            if not turn.done() or turn.cancelled():
                self._forget(uri, turn)

    def is_queued(self, uri: str) -> bool:
        """Whether a call of the identity waits until handlers hold less."""
        return uri in self._waiting

    def _let_next(self) -> None:
        """Resume as many calls as there is room for, if each gets a message of the largest size."""
        room = READ_BYTES_MAX - self.total
        while self._waiting and room > 0:
            if self._let(min(self._waiting, key=self._held.__getitem__)):
                room -= MESSAGE_BYTES_MAX

    def _let(self, uri: str) -> bool:
        """Resume one call of the identity. Return False if no call waits."""
        while (line := self._waiting.get(uri)) is not None:
            turn = line[0]
            self._forget(uri, turn)
            if not turn.done():
                turn.set_result(None)
                return True
        return False

    def _forget(self, uri: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(uri)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[uri]


class OpenCall:
    """A running call. Call `end` when its memory is needed."""

    def __init__(self, identity: Identity, budget: ReadBudget, now: Callable[[], float]) -> None:
        self.identity: Final = identity
        self.waits_since_s: float | None = None
        """The time since which its handler has waited for a message; None while it does not wait."""
        self.is_ending = False
        self._budget, self._now = budget, now
        self._read_bytes = 0
        """The size of the message that its handler holds."""
        self._deadline = asyncio.Timeout(None)

    def end(self) -> None:
        """Cancel its handler, and end the call with `rt.Overloaded`."""
        self.is_ending = True
        self._deadline.reschedule(self._now())

    async def read(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Return the next message of `context`. The previous message is handled."""
        self._set(0)
        if self.identity.role != "node":
            await self._budget.has_room(self.identity.uri)
        self.waits_since_s = self._now()
        try:
            message = await context.read()
        finally:
            self.waits_since_s = None
        if isinstance(message, bytes):
            self._set(len(message))
        return message

    def leave(self) -> None:
        self._set(0)

    def _set(self, size: int) -> None:
        self._budget.add(self.identity.uri, size - self._read_bytes)
        self._read_bytes = size

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A context manager around its handler."""
        try:
            async with self._deadline:
                yield
        except TimeoutError:
            if not self._deadline.expired():
                raise
            raise _overloaded(self.identity.uri) from None


class WatchedContext:
    """The context of a call. It records since when the call waits for a message. All else is gRPC's."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], call: OpenCall) -> None:
        self._context, self._call = context, call
        self.write = context.write

    async def read(self) -> Any:
        """See `grpc.aio.ServicerContext.read`."""
        return await self._call.read(self._context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class OpenCalls:
    """All calls of one server."""

    def __init__(self, *, refused: Counter[str] | None = None) -> None:
        self.refused: Final = Counter[str]() if refused is None else refused
        """By the class of the error. Calls that were ended are counted here."""
        self.reading: Final = ReadBudget()
        self._calls: dict[OpenCall, None] = {}
        """Oldest first."""
        self._counts: Counter[str] = Counter()
        """By the identity's URI."""

    @property
    def is_short(self) -> bool:
        """Whether memory is short. If so, an identity with `CALLS_WHILE_SHORT_MAX` calls cannot start
        more.
        """
        return not self.reading.has_memory.is_set()

    def record_memory(self, *, is_short: bool) -> None:
        if is_short:
            self.reading.has_memory.clear()
        else:
            self.reading.has_memory.set()

    def __len__(self) -> int:
        return len(self._calls)

    @contextlib.asynccontextmanager
    async def entered(self, identity: Identity) -> AsyncIterator[OpenCall]:
        """A context manager around a call. `rt.Overloaded` if it may not start now, and when it is ended."""
        uri = identity.uri
        if self.is_short and self._counts[uri] >= CALLS_WHILE_SHORT_MAX and identity.role != "node":
            raise _overloaded(uri)
        call = OpenCall(identity, self.reading, asyncio.get_running_loop().time)
        self._calls[call] = None
        self._counts[uri] += 1
        try:
            async with call.running():
                yield call
        finally:
            del self._calls[call]
            call.leave()
            self._counts[uri] -= 1
            if not self._counts[uri]:
                del self._counts[uri]

    def end_some(self, count: int, *, kept: int = CALLS_KEPT) -> None:
        """End calls until `count` calls are ending. Each identity keeps its last `kept` calls."""
        count -= sum(call.is_ending for call in self._calls)
        chosen = calls_to_end(self._calls, count, asyncio.get_running_loop().time(), kept=kept)
        for call in chosen:
            call.end()
        self.refused[Overloaded.__name__] += len(chosen)


def calls_to_end(calls: Iterable[OpenCall], count: int, now_s: float, *, kept: int = 0) -> list[OpenCall]:
    """Choose up to `count` calls whose end costs honest peers least. Each identity keeps `kept` calls."""
    groups: dict[str, list[OpenCall]] = defaultdict(list)
    for call in calls:
        if not call.is_ending and call.identity.role != "node":
            groups[call.identity.uri].append(call)
    for group in groups.values():
        # Calls that have waited longest are ended first.
        group.sort(key=lambda call: -_stalled_s(call, now_s))
    chosen: list[OpenCall] = []
    while len(chosen) < count:
        uri = max(groups, key=lambda uri: _rank(groups[uri], kept, now_s), default=None)
        if uri is None or len(groups[uri]) <= kept:
            break
        chosen.append(groups[uri].pop(0))
    return chosen


def _stalled_s(call: OpenCall, now_s: float) -> float:
    """The time for which the call has waited for a message; 0 while it is less than `STALLED_S`."""
    waited_s = 0.0 if call.waits_since_s is None else now_s - call.waits_since_s
    return waited_s if waited_s >= STALLED_S else 0.0


def _rank(group: list[OpenCall], kept: int, now_s: float) -> tuple[bool, int]:
    """The rank of an identity. The identity with the highest rank loses the next call."""
    has_stalled = len(group) > kept and _stalled_s(group[0], now_s) > 0
    return has_stalled, len(group)


def _overloaded(where: str) -> Overloaded:
    return Overloaded(
        "this node is short of memory",
        where=where,
        hint="Call again: what was stored stays. Identities with the most calls are rejected first.",
    )
